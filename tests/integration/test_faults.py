"""Deterministic faults, then random ones, against real worker processes and real servers.

A ledger outside Redis says what was executed; the handles say how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from taskmesh import BoundCall, BrokerFull, Context, Mesh, Priority, TaskFailed, WorkerSettings
from taskmesh.broker.scripts import CLAIM, FETCH, SETTLE, SUBMIT
from taskmesh.messages import Status
from taskmesh.testing import Point, Proxy, RedisServer, wait_until
from taskmesh.testing.faults import VARIABLE
from tests.conftest import MakeMesh, settings_for_tests

TTL = 0.6
PROGRAM = Path(__file__).with_name("fault_worker.py")
PREFIX = "taskmesh:{faults:default:0}:"


class Fleet:
    """Worker processes over one server, and their ledger."""

    def __init__(self, url: str, ledger: Path) -> None:
        self._ledger = ledger
        self._environment = {
            **os.environ,
            "TASKMESH_URL": url,
            "TASKMESH_LIVENESS_TTL": str(TTL),
            "LEDGER": str(ledger),
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start a worker; returns when it serves."""
        process = self.launch(**environment)
        self.await_ready(process)
        return process

    def launch(self, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def await_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    def executions(self, task: str = "work") -> list[list[str]]:
        """The ledger's lines of a task: [number, pid, deliveries]."""
        lines = self._ledger.read_text().splitlines() if self._ledger.exists() else []
        return [words[1:] for line in lines if (words := line.split())[0] == task]

    def times(self) -> Counter[int]:
        """How often each number was executed."""
        return Counter(int(number) for number, _, _ in self.executions())

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.fixture
def fleet(redis_url: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(redis_url, tmp_path / "ledger")
    yield made
    made.end()


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Mesh]:
    """The submitting side: the same tasks, no worker."""
    async with client_of(redis_url) as mesh:
        yield mesh


def client_of(url: str, **changes: Any) -> Mesh:
    mesh = Mesh("faults", settings=settings_for_tests(url, liveness_ttl=TTL, **changes))

    @mesh.task
    async def work(n: int, seconds: float = 0.0) -> int:
        return n

    @mesh.task
    async def who(seconds: float) -> int:
        return 0

    @mesh.task
    async def poison() -> None: ...

    return mesh


# SIGKILL at each point


@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", list(Point))
async def test_killed_at_a_point_every_message_ends_once(
    fleet: Fleet, producer: Mesh, point: Point, nth: int
) -> None:
    victim = fleet.start(**{VARIABLE: f"{point}:{nth}", "CONCURRENCY": "2"})
    work = producer.get_task("work")
    handles = [await work.submit(0)]  # the victim is alone, and takes one after the other
    for n in range(1, nth):
        await handles[-1].result(timeout=10)
        handles.append(await work.submit(n))
    await asyncio.to_thread(victim.wait, 10)
    assert victim.returncode == -signal.SIGKILL
    handles += await work.submit_many(range(nth, 30))
    fleet.start()
    assert [await handle.result(timeout=10) for handle in handles] == list(range(30))
    times = fleet.times()
    assert set(times) == set(range(30))
    twice = sum(times.values()) - 30
    if point in (Point.FETCHED, Point.STARTED, Point.SETTLED):
        assert twice <= 1  # what ran beside the one that died
    else:
        assert 1 <= twice <= 2
    assert producer.client.repeats == 0
    assert await producer.dead_letters() == []


# SIGSTOP for longer than the liveness TTL


async def test_a_worker_stopped_for_too_long_comes_back_to_a_lost_claim(
    fleet: Fleet, producer: Mesh, plain: redis.Redis
) -> None:
    stopped = fleet.start()
    handle = await producer.get_task("who").submit(0.5)
    await wait_until(lambda: fleet.executions("who"))
    os.kill(stopped.pid, signal.SIGSTOP)
    survivor = fleet.start()
    assert await handle.result(timeout=10) == survivor.pid
    os.kill(stopped.pid, signal.SIGCONT)
    survivor.send_signal(signal.SIGTERM)
    await asyncio.to_thread(survivor.wait, 10)
    # It goes on under a new name, and what it had finished late was dropped.
    again = await producer.get_task("who").submit(0.0)
    assert await again.result(timeout=10) == stopped.pid
    assert len(fleet.executions("who")) == 3
    assert producer.client.repeats == 0
    await wait_until(lambda: plain.zcard(PREFIX + "workers") == 1)


async def test_if_it_finishes_first_it_wins_and_the_others_outcome_is_dropped(
    fleet: Fleet, producer: Mesh, plain: redis.Redis
) -> None:
    stopped = fleet.start()
    handle = await producer.get_task("who").submit(1.5)
    await wait_until(lambda: fleet.executions("who"))
    await asyncio.sleep(0.5)
    os.kill(stopped.pid, signal.SIGSTOP)
    survivor = fleet.start()
    await wait_until(lambda: len(fleet.executions("who")) == 2)
    os.kill(stopped.pid, signal.SIGCONT)
    assert await handle.result(timeout=10) == stopped.pid
    await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)
    later = await producer.get_task("work").submit(1)
    await later.result(timeout=10)
    survivor.send_signal(signal.SIGTERM)
    await asyncio.to_thread(survivor.wait, 10)
    assert producer.client.repeats == 0
    assert len(fleet.executions("who")) == 2


async def test_what_arrives_for_a_stopped_workers_blocked_read_is_not_lost(
    fleet: Fleet, producer: Mesh
) -> None:
    stopped = fleet.start()
    work = producer.get_task("work")
    await (await work.submit(0)).result(timeout=5)
    await asyncio.sleep(0.1)  # it is idle now: its read waits at the server
    os.kill(stopped.pid, signal.SIGSTOP)
    fleet.start()
    await asyncio.sleep(TTL * 2)  # it is struck off while its read still waits
    handles = await work.submit_many(range(1, 20))
    assert [await handle.result(timeout=15) for handle in handles] == list(range(1, 20))


# The server


async def test_a_task_that_runs_while_the_server_is_killed_and_restarted_finishes(
    free_server: RedisServer,
) -> None:
    mesh = Mesh("test", settings=settings_for_tests(free_server.url))
    runs = 0

    @mesh.task
    async def slow(seconds: float) -> float:
        nonlocal runs
        runs += 1
        await asyncio.sleep(seconds)
        return seconds

    async with mesh, mesh.worker():
        handles = await slow.submit_many([0.5, 1.0, 1.5])
        await wait_until(lambda: runs == 3)
        await asyncio.sleep(0.2)
        free_server.kill()
        await asyncio.sleep(0.5)  # the first ends while the server is away
        free_server.start()
        assert [await handle.result(timeout=10) for handle in handles] == [0.5, 1.0, 1.5]
        assert await (await slow.submit(0.0)).result(timeout=10) == 0.0
        assert mesh.client.repeats == 0
    assert runs == 4


async def test_submitting_goes_on_over_a_restart_and_nothing_is_accepted_twice(
    free_server: RedisServer,
) -> None:
    mesh = Mesh("test", settings=settings_for_tests(free_server.url))
    runs: Counter[int] = Counter()

    @mesh.task
    async def work(n: int) -> int:
        runs[n] += 1
        return n

    async with mesh, mesh.worker():
        handles = []
        for n in range(60):
            if n == 20:
                free_server.kill()
                asyncio.get_running_loop().call_later(0.3, free_server.start)
            handles.append(await work.submit(n))
        assert [await handle.result(timeout=10) for handle in handles] == list(range(60))
    assert runs == Counter(range(60))


async def test_the_embedded_server_is_revived_after_a_crash(tmp_path: Path) -> None:
    mesh = Mesh("test", settings=settings_for_tests(None, data_folder=tmp_path))
    runs = 0

    @mesh.task
    async def slow() -> str:
        nonlocal runs
        runs += 1
        await asyncio.sleep(0.5)
        return "done"

    async with mesh, mesh.worker():
        handle = await slow.submit()
        await wait_until(lambda: runs)
        information = await mesh.client.caller.command(b"x", "INFO", "server")
        pid = int(
            next(line for line in information.split() if line.startswith(b"process_id:")).split(b":")[1]
        )
        os.kill(pid, signal.SIGKILL)
        assert await handle.result(timeout=15) == "done"
        assert await (await slow.submit()).result(timeout=15) == "done"
    assert runs == 2


async def test_a_frozen_server_costs_nobody_his_lease(free_server: RedisServer) -> None:
    meshes = [Mesh("test", settings=settings_for_tests(free_server.url)) for _ in range(2)]
    runs = 0

    async def slow() -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(2.5)
        return runs

    task, _ = [mesh.task(slow) for mesh in meshes]
    async with meshes[0], meshes[1], meshes[0].worker(), meshes[1].worker():
        handle = await task.submit()
        await wait_until(lambda: runs)
        free_server.pause()
        await asyncio.sleep(1.5)  # longer than the liveness TTL
        free_server.resume()
        assert await handle.result(timeout=10) == 1
    assert runs == 1


async def test_flushing_everything_under_a_waiting_worker_does_not_stop_it(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh()

    @mesh.task
    async def work(n: int) -> int:
        return n

    async with mesh, mesh.worker():
        assert await (await work.submit(1)).result(timeout=5) == 1
        for n in range(3):
            await asyncio.sleep(0.05)  # it waits in a blocking read
            plain.flushall()
            assert await (await work.submit(n)).result(timeout=8) == n
        await wait_until(lambda: plain.zcard("taskmesh:{test:default:0}:workers") == 1)


async def test_a_full_server_refuses_new_work_and_finishes_the_old(free_server: RedisServer) -> None:
    mesh = Mesh("test", settings=settings_for_tests(free_server.url))
    ran: Counter[int] = Counter()

    @mesh.task
    async def work(n: int, padding: bytes) -> int:
        ran[n] += 1
        return n

    async with mesh:
        used = int(free_server.command("INFO", "memory")["used_memory"])
        free_server.command("CONFIG", "SET", "maxmemory", used + 1_000_000)
        handles = []
        with pytest.raises(BrokerFull, match="memory limit"):
            for n in range(5000):
                handles.append(await work.submit(n, b"x" * 1000))
        assert len(handles) > 50
        async with mesh.worker():
            # Acknowledging frees memory, though every settle writes a record.
            results = [await handle.result(timeout=20) for handle in handles]
            assert results == list(range(len(handles)))
            free_server.command("CONFIG", "SET", "maxmemory", 0)
            assert await (await work.submit(-1, b"")).result(timeout=5) == -1
        assert mesh.client.repeats == 0
    assert set(ran.values()) == {1}
    assert len(ran) == len(handles) + 1


async def test_a_server_that_stays_full_still_settles_and_keeps_leases(free_server: RedisServer) -> None:
    mesh = Mesh("test", settings=settings_for_tests(free_server.url, liveness_ttl=TTL))
    ran: list[int] = []

    @mesh.task
    async def work(n: int) -> int:
        ran.append(n)
        await asyncio.sleep(TTL * 2.5)
        return n

    async with mesh, mesh.worker():
        handles = await work.submit_many(range(20))
        await wait_until(lambda: len(ran) == 20)
        free_server.command("CONFIG", "SET", "maxmemory", 1)
        assert [await handle.result(timeout=20) for handle in handles] == list(range(20))
        with pytest.raises(BrokerFull):
            await work.submit(99)
        free_server.command("CONFIG", "SET", "maxmemory", 0)
    assert sorted(ran) == list(range(20))


# Replies that are lost


@pytest.fixture
async def proxy(server: RedisServer, redis_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as made:
        yield made


async def test_a_lost_reply_to_a_submit_is_accepted_once(
    proxy: Proxy, make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(url=proxy.url)

    @mesh.task
    async def work(n: int) -> int:
        return n

    async with mesh:
        proxy.cut_reply_after(SUBMIT.sha, times=2)
        handle = await work.submit(1)
        many = await work.submit_many(range(2, 1502))
        assert proxy.cuts == 2
        assert plain.xlen("taskmesh:{test:default:0}:tasks:normal") == 1501
        async with mesh.worker():
            assert await handle.result(timeout=5) == 1
            assert [await each.result(timeout=5) for each in many] == list(range(2, 1502))
        assert mesh.client.repeats == 0


@pytest.mark.parametrize("script", [SETTLE, FETCH], ids=["settle", "fetch"])
async def test_a_lost_reply_in_a_worker_loses_and_doubles_nothing(
    proxy: Proxy, make_mesh: MakeMesh, script: Any
) -> None:
    here, there = make_mesh(), make_mesh(url=proxy.url)
    ran: Counter[int] = Counter()

    async def work(n: int) -> int:
        ran[n] += 1
        if n % 10 == 0:
            raise ValueError(n)
        return n

    task = here.task(work)
    there.task(work)
    async with here, there:
        handles = await task.submit_many(range(500))
        proxy.cut_reply_after(script.sha, times=3)
        async with there.worker(WorkerSettings(concurrency=20, max_fetch=50)):
            for n, handle in enumerate(handles):
                if n % 10:
                    assert await handle.result(timeout=10) == n
                else:
                    with pytest.raises(TaskFailed):
                        await handle.result(timeout=10)
        assert proxy.cuts == 3
        assert here.client.repeats == 0
        assert len(await here.dead_letters()) == 50
    assert ran == Counter(range(500))


async def test_entries_whose_claim_was_not_heard_of_are_found_again(
    proxy: Proxy, make_mesh: MakeMesh
) -> None:
    here, there = make_mesh(liveness_ttl=TTL), make_mesh(url=proxy.url, liveness_ttl=TTL)
    ran: Counter[int] = Counter()

    async def work(n: int) -> None:
        ran[n] += 1
        if there_has_it:
            return
        await asyncio.sleep(30)

    there_has_it = False
    task = here.task(work)
    there.task(work)
    async with here, there:
        async with here.worker() as worker:
            handles = await task.submit_many(range(10))
            await wait_until(lambda: len(ran) == 10)
            proxy.cut_reply_after(CLAIM.sha)
            there_has_it = True
            async with there.worker():
                await worker.stop(timeout=0.0)
                await asyncio.gather(*(handle.result(timeout=10) for handle in handles))
        assert proxy.cuts == 1
    assert ran == Counter(dict.fromkeys(range(10), 2))


async def test_what_one_lane_gave_is_not_lost_when_another_is_gone(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(name="faults")
    release = asyncio.Event()
    started: list[int] = []

    @mesh.task(priority=Priority.HIGH)
    async def work(n: int) -> int:
        started.append(n)
        await release.wait()
        return n

    async with mesh.worker(WorkerSettings(concurrency=16)):
        first = await work.submit_many(range(16))
        await wait_until(lambda: len(started) == 16)
        later = await work.submit_many(range(16, 18))
        plain.delete(PREFIX + "tasks:normal")
        release.set()
        assert [await handle.result(timeout=10) for handle in [*first, *later]] == list(range(18))


ONE_AT_A_TIME = """
import asyncio
from taskmesh import Mesh, WorkerSettings

mesh = Mesh("test")

@mesh.task
async def work(n: int) -> int:
    await asyncio.sleep(0.2 if n < 0 else 0.001)
    return n

async def main():
    async with mesh.worker(WorkerSettings(concurrency=1, fetch_ahead=0.0)):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_cancels_that_came_in_a_flood_are_all_heard(make_mesh: MakeMesh, redis_url: str) -> None:
    here = make_mesh()

    @here.task
    async def work(n: int) -> int:
        return n

    environment = {**os.environ, "TASKMESH_URL": redis_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ONE_AT_A_TIME, env=environment, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        await process.stdout.readline()
        async with here:
            await work.submit(-1)
            handles = await work.submit_many(range(3000))
            await asyncio.sleep(0.05)
            process.send_signal(signal.SIGSTOP)
            # By their ids: where they wait is not known, so their workers have to be told.
            await asyncio.gather(*(work.handle(handle.id).cancel() for handle in handles))
            process.send_signal(signal.SIGCONT)
            outcomes = await asyncio.gather(*(handle.outcome(timeout=20) for handle in handles))
    finally:
        process.kill()
        await process.wait()
    statuses = Counter(outcome.status for outcome in outcomes)
    assert statuses[Status.CANCELLED] > 2800, statuses  # but what ran meanwhile


async def test_connections_cut_again_and_again_lose_nothing(proxy: Proxy, make_mesh: MakeMesh) -> None:
    here, there = make_mesh(), make_mesh(url=proxy.url)
    ran: Counter[int] = Counter()

    async def work(n: int) -> int:
        ran[n] += 1
        await asyncio.sleep(0.002)
        return n

    task = there.task(work)
    here.task(work)
    async with here, there, there.worker(WorkerSettings(concurrency=10)):

        async def cut() -> None:
            for _ in range(15):
                await asyncio.sleep(0.1)
                proxy.cut_all()

        cutting = asyncio.create_task(cut())
        handles = []
        for n in range(300):
            handles.append(await task.submit(n))
            await asyncio.sleep(0.003)
        await cutting
        assert [await handle.result(timeout=15) for handle in handles] == list(range(300))
    assert ran == Counter(range(300))


# Poison, restarts, races


async def keep_alive(
    fleet: Fleet, until: Callable[[], bool], workers: int = 1, timeout: float = 30.0
) -> None:
    """Start workers again as they die."""
    give_up_at = time.monotonic() + timeout
    alive: list[subprocess.Popen[bytes]] = []
    while not until():
        assert time.monotonic() < give_up_at, "it did not come true"
        alive = [process for process in alive if process.poll() is None]
        while len(alive) < workers:
            alive.append(fleet.launch())
        await asyncio.sleep(0.02)


async def test_a_task_that_kills_its_worker_is_dead_lettered_and_the_rest_goes_on(
    fleet: Fleet, producer: Mesh
) -> None:
    poison = await producer.get_task("poison").submit()
    handles = await producer.get_task("work").submit_many(range(50))
    ended = asyncio.ensure_future(poison.outcome())
    await keep_alive(fleet, ended.done)
    with pytest.raises(TaskFailed, match="died"):
        await poison.result(timeout=1)
    assert [await handle.result(timeout=10) for handle in handles] == list(range(50))
    assert [deliveries for _, _, deliveries in fleet.executions("poison")] == ["1", "2", "3"]
    [letter] = await producer.dead_letters()
    assert letter.reason == "worker died"


async def test_what_was_in_flight_beside_a_killer_is_not_condemned(fleet: Fleet, producer: Mesh) -> None:
    neighbours = await producer.get_task("work").submit_many([BoundCall((n, 1.0), {}) for n in range(8)])
    poison = await producer.get_task("poison").submit()
    ended = [asyncio.ensure_future(handle.outcome()) for handle in [poison, *neighbours]]
    await keep_alive(fleet, lambda: all(future.done() for future in ended), workers=2, timeout=60)
    with pytest.raises(TaskFailed, match="died"):
        await poison.result(timeout=1)
    assert [await handle.result(timeout=1) for handle in neighbours] == list(range(8))
    assert len(fleet.executions("poison")) == 3


async def test_a_hundred_random_terminations_under_load_lose_nothing(fleet: Fleet, producer: Mesh) -> None:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    draw = random.Random(seed)
    work = producer.get_task("work")
    handles: list[Any] = []
    loaded = True

    async def load() -> None:
        while loaded:
            n = len(handles)
            handles.extend(await work.submit_many([work.bind(n + k, 0.005) for k in range(20)]))
            await asyncio.sleep(0.05)

    loading = asyncio.create_task(load())
    workers = [fleet.start() for _ in range(3)]
    for _ in range(100):
        place = draw.randrange(3)
        await asyncio.sleep(draw.random() * 0.05)
        workers[place].send_signal(signal.SIGTERM)
        await asyncio.to_thread(workers[place].wait, 10)
        assert workers[place].returncode == 0
        workers[place] = fleet.launch()
        await asyncio.to_thread(fleet.await_ready, workers[place])
    loaded = False
    await loading
    assert [await handle.result(timeout=20) for handle in handles] == list(range(len(handles)))
    assert fleet.times() == Counter(range(len(handles)))
    assert producer.client.repeats == 0


async def test_eight_workers_claim_one_stale_entry_and_one_gets_it(make_mesh: MakeMesh) -> None:
    runs: list[str] = []

    async def work(ctx: Context) -> int:
        runs.append(ctx.worker)
        if ctx.deliveries == 1:
            await asyncio.sleep(60)
        return ctx.deliveries

    victim_mesh = make_mesh(liveness_ttl=0.5)
    task = victim_mesh.task(work)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(victim_mesh)
        for _ in range(20):
            runs.clear()
            async with victim_mesh.worker() as victim:
                handle = await task.submit()
                await wait_until(lambda: len(runs) == 1)
                victim.abandon()
            async with contextlib.AsyncExitStack() as round_stack:
                for _ in range(8):
                    mesh = make_mesh(liveness_ttl=0.5)
                    mesh.task(work)
                    await round_stack.enter_async_context(mesh.worker())
                assert await handle.result(timeout=5) == 2
            assert len(runs) == 2
        assert victim_mesh.client.repeats == 0
