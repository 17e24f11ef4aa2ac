"""What deployments run into: races for stale work, restarts by the hundred, deep queues, skewed clocks, full servers.

Workers live in this process where their death is a matter of what Redis hears, and in processes where memory matters.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from pathlib import Path

import pytest
import redis

from taskmesh import (
    BrokerFull,
    Call,
    Context,
    Handle,
    Mesh,
    Next,
    QueueFull,
    QueueOptions,
    TaskFailed,
    WorkerSettings,
)
from taskmesh.events import Event, Settled
from taskmesh.monitoring import snapshot
from taskmesh.testing import RedisServer, wait_until
from taskmesh.worker.runtime import Worker
from tests.conftest import MakeMesh, settings_for_tests
from tests.integration.cli_support import resident_bytes
from tests.integration.fault_fleet import PREFIX as FLEET_PREFIX
from tests.integration.fault_fleet import Fleet, held_by

TTL = 0.5
PREFIX = "taskmesh:{test:default:0}:"
LANE = PREFIX + "tasks:normal"


class Ledger:
    """An observer that counts the outcomes that had lost their claim."""

    def __init__(self) -> None:
        self.dropped = 0

    def on_event(self, event: Event) -> None:
        if isinstance(event, Settled):
            self.dropped += event.dropped


def consumers(plain: redis.Redis) -> set[bytes]:
    return {consumer["name"] for consumer in plain.xinfo_consumers(LANE, "workers")}


def hand_over(plain: redis.Redis, to: Worker) -> None:
    """Have the one message that a worker holds belong to another one as well."""
    [entry] = plain.xpending_range(LANE, "workers", "-", "+", 1)
    plain.xclaim(LANE, "workers", to.worker, 0, [entry["message_id"]])
    plain.xadd(PREFIX + "control", {"given": to.worker})


# stale work, and who gets it


async def test_eight_workers_race_for_a_thousand_stale_entries(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """Each is held by a dead consumer of its own, so that all eight claim each at the same time."""
    meshes = [make_mesh(liveness_ttl=TTL) for _ in range(8)]
    runs: Counter[int] = Counter()

    async def work(ctx: Context, n: int) -> int:
        runs[n] += 1
        return ctx.deliveries

    task, *_ = [mesh.task(work) for mesh in meshes]
    async with contextlib.AsyncExitStack() as stack:
        for mesh in meshes:
            await stack.enter_async_context(mesh)
        handles = await task.submit_many(range(1000))
        plain.xgroup_create(LANE, "workers", "0")
        with plain.pipeline(transaction=False) as pipe:
            for n in range(1000):
                pipe.xreadgroup("workers", f"dead-{n}", {LANE: ">"}, count=1)
                pipe.zadd(PREFIX + "workers", {f"dead-{n}": 1000 + n})
            pipe.execute()
        workers = [await stack.enter_async_context(mesh.worker()) for mesh in meshes]
        assert [await handle.result(timeout=30) for handle in handles] == [2] * 1000
        await wait_until(lambda: plain.zcard(PREFIX + "workers") == 8)
        assert consumers(plain) <= {worker.worker for worker in workers}
        assert meshes[0].client.repeats == 0
    assert runs == Counter(range(1000))


async def test_a_start_long_after_the_fetch_is_no_reason_to_take_it_away(make_mesh: MakeMesh) -> None:
    """Longer than the lease, while five others look for stale work all the time."""
    runs: Counter[int] = Counter()

    async def hesitate(call: Call, call_next: Next) -> object:
        await asyncio.sleep(TTL * 2)
        return await call_next(call)

    async def work(ctx: Context, n: int) -> int:
        runs[n] += 1
        return ctx.deliveries

    slow = make_mesh(liveness_ttl=TTL, middleware=[hesitate])
    task = slow.task(work)
    async with contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(slow.worker())
        handles = await task.submit_many(range(50))
        for _ in range(5):
            eager = make_mesh(liveness_ttl=TTL)
            eager.task(work)
            await stack.enter_async_context(eager.worker())
        assert [await handle.result(timeout=10) for handle in handles] == [1] * 50
    assert runs == Counter(range(50))


@pytest.mark.parametrize("first_succeeds", [True, False], ids=["late success", "late failure"])
async def test_a_success_is_never_rewritten_as_a_failure(
    make_mesh: MakeMesh, plain: redis.Redis, first_succeeds: bool
) -> None:
    """A worker loses its claim in mid-task, and both run to different ends: the success counts, whoever has it."""
    ledger = Ledger()
    mesh = make_mesh(observers=[ledger])
    go = {1: asyncio.Event(), 2: asyncio.Event()}
    started: list[int] = []

    @mesh.task
    async def work(ctx: Context) -> int:
        started.append(ctx.deliveries)
        await go[ctx.deliveries].wait()
        if (ctx.deliveries == 1) is first_succeeds:
            return ctx.deliveries
        raise ValueError("the other run's failure")

    async with mesh, mesh.worker():
        handle = await work.submit()
        await wait_until(lambda: started == [1])
        async with mesh.worker() as second:
            hand_over(plain, second)
            await wait_until(lambda: started == [1, 2])
            go[1].set()
            await asyncio.sleep(0.2)
            go[2].set()
            assert await handle.result(timeout=5) == (1 if first_succeeds else 2)
            await wait_until(lambda: ledger.dropped == 1)
        again = work.handle(handle.id)
        assert await again.result(timeout=5) == (1 if first_succeeds else 2)
        assert await mesh.dead_letters() == []
        assert mesh.client.repeats == 0


async def test_two_hundred_restarts_leave_the_list_of_consumers_as_it_was(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """Drained, drained with work in hand, dead, and dead with work in hand, in turn; one worker stays throughout."""
    mesh = make_mesh(liveness_ttl=TTL)
    stays = b""
    held = 0

    @mesh.task
    async def work(ctx: Context) -> int:
        nonlocal held
        if ctx.worker.encode() != stays:
            held += 1
            await asyncio.sleep(60)
        return ctx.deliveries

    most = 0
    async with mesh, mesh.worker() as survivor:
        stays = survivor.worker
        handles = []
        for n in range(200):
            worker = Worker(
                mesh.client.partitions("default"),
                mesh.registry,
                mesh.settings,
                WorkerSettings(concurrency=1),
                mesh.observers,
            )
            await worker.start()
            if n % 2:
                await asyncio.sleep(0.02)  # both wait in a blocking read, and are served in turn
                handles += [await work.submit() for _ in range(3)]
            if n % 4 < 2:
                await worker.stop(0.0)
            else:
                worker.abandon()
            most = max(most, len(consumers(plain)))
        assert {type(await handle.result(timeout=20)) for handle in handles} == {int}
        await wait_until(lambda: plain.zrange(PREFIX + "workers", 0, -1) == [stays])
        assert consumers(plain) <= {stays}
        assert plain.hkeys(PREFIX + "known") == [stays]
        assert set(plain.keys(PREFIX + "settles:*")) <= {(PREFIX + "settles:").encode() + stays}
    assert held >= 20
    assert most < 150


# deep queues


async def test_after_a_drain_the_stream_is_as_small_as_before(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """Thirty thousand around a message that runs, and one that nobody has fetched: those two stay to the end."""
    mesh = make_mesh(result_ttl=0)
    release, held = asyncio.Event(), asyncio.Event()
    done = 0

    @mesh.task
    async def work(n: int) -> None:
        nonlocal done
        done += 1

    @mesh.task
    async def hold() -> None:
        held.set()
        await release.wait()

    async def drained(left: int) -> int:
        await wait_until(lambda: plain.xlen(LANE) == left, timeout=60)
        return int(plain.memory_usage(LANE, samples=0))

    async with mesh:
        async with mesh.worker():
            await work.submit_many(range(1000))
            before, keys = await drained(0), plain.dbsize()
        await work.submit_many(range(15_000))
        await hold.submit()
        await work.submit_many(range(15_000))
        assert plain.memory_usage(LANE, samples=0) > before + 1_000_000
        async with mesh.worker():
            await asyncio.wait_for(held.wait(), 30)
            assert await drained(1) < before + 20_000
            release.set()
            assert await drained(0) < before + 2000
            assert plain.dbsize() <= keys + 2
    assert done == 31_000


async def test_twenty_workers_share_what_takes_long_and_none_hoards(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """A thousand tasks that end in bursts, ten at a time: a worker holds its slots' worth and little more."""
    mesh = make_mesh()
    by: Counter[str] = Counter()

    @mesh.task
    async def work(ctx: Context, n: int) -> int:
        by[ctx.worker] += 1
        await asyncio.sleep(0.2)
        return n

    most = 0
    async with mesh, contextlib.AsyncExitStack() as stack:
        for _ in range(20):
            await stack.enter_async_context(mesh.worker(WorkerSettings(concurrency=10)))
        handles = await work.submit_many(range(1000))
        while plain.xlen(LANE):
            most = max(most, *held_by(plain, LANE).values(), 0)
            await asyncio.sleep(0.02)
        assert [await handle.result(timeout=5) for handle in handles] == list(range(1000))
    assert 10 <= most <= 20
    assert len(by) == 20 and max(by.values()) <= 100


async def test_delayed_work_stays_in_redis_and_workers_stay_small(
    fleet: Fleet, producer: Mesh, plain: redis.Redis
) -> None:
    """Twenty thousand that are due later, then all at once."""
    worker = fleet.start()
    work = producer.get_task("work").options(result_ttl=0)
    await work.submit_many(range(100_000, 100_500))
    await wait_until(lambda: len(fleet.times()) == 500)
    before = resident_bytes(worker.pid)
    for first in range(0, 20_000, 1000):
        await asyncio.gather(*(work.submit_in(3600, n) for n in range(first, first + 1000)))
    assert plain.zcard(FLEET_PREFIX + "delayed") == 20_000
    assert plain.xpending(FLEET_PREFIX + "tasks:normal", "workers")["pending"] == 0
    assert resident_bytes(worker.pid) < before + 4_000_000
    plain.zunionstore(
        FLEET_PREFIX + "delayed", {FLEET_PREFIX + "delayed": 0}
    )  # an hour has passed for all of them
    await wait_until(lambda: plain.xlen(FLEET_PREFIX + "tasks:normal") > 0)
    await wait_until(
        lambda: not plain.exists(FLEET_PREFIX + "delayed") and not plain.xlen(FLEET_PREFIX + "tasks:normal"),
        timeout=60,
    )
    assert resident_bytes(worker.pid) < before + 12_000_000
    times = fleet.times()
    assert len(times) == 20_500 and set(times.values()) == {1}


async def test_large_arguments_whose_submit_was_refused_go_by_themselves(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    bound = QueueOptions(max_length=1, when_full="reject")
    mesh = make_mesh(queues={"default": bound}, result_ttl=30)

    @mesh.task
    async def size(data: bytes) -> int:
        return len(data)

    def lives() -> list[int]:
        return sorted(int(plain.pttl(key)) for key in plain.keys("*:args:*"))

    async with mesh:
        handle = await size.submit(b"x" * 3_000_000)
        assert lives() == [-1] * 3  # as long as the message
        with pytest.raises(QueueFull):
            await size.submit(b"y" * 2_000_000)
        assert all(0 < life <= 600_000 for life in lives()[3:])
        async with mesh.worker():
            assert await handle.result(timeout=10) == 3_000_000
        assert -1 not in lives()


async def test_a_server_that_fills_up_again_and_again_under_load_loses_nothing(
    free_server: RedisServer,
) -> None:
    """What was refused never runs, what was accepted runs once, large results included, whatever waits meanwhile."""
    mesh = Mesh("test", settings=settings_for_tests(free_server.url, inline_limit_bytes=20_000))
    ran: Counter[int] = Counter()
    refused: set[int] = set()
    handles: dict[int, Handle[bytes]] = {}
    going = True

    @mesh.task
    async def grow(n: int, data: bytes) -> bytes:
        ran[n] += 1
        return data * (50 if n % 10 == 0 else 1)

    async def produce(first: int) -> None:
        n = first
        while going:
            try:
                handles[n] = await grow.submit(n, b"%04d" % (n % 10_000) * 500)
            except BrokerFull as error:
                assert "memory limit" in str(error)
                refused.add(n)
            n += 4
            await asyncio.sleep(0.01)

    async with mesh, mesh.worker():
        producing = [asyncio.create_task(produce(first)) for first in range(4)]
        for _ in range(3):
            before = len(refused)
            used = int(free_server.command("INFO", "memory")["used_memory"])
            free_server.command("CONFIG", "SET", "maxmemory", used + 500_000)
            await wait_until(lambda before=before: len(refused) > before + 30)
            free_server.command("CONFIG", "SET", "maxmemory", 0)
            accepted = len(handles)
            await wait_until(lambda accepted=accepted: len(handles) > accepted + 30)
        going = False
        await asyncio.gather(*producing)
        for n, handle in handles.items():
            assert await handle.result(timeout=20) == b"%04d" % (n % 10_000) * (
                25_000 if n % 10 == 0 else 500
            )
        assert mesh.client.repeats == 0
    assert ran == Counter(handles.keys()) and not refused & set(ran)


async def test_a_million_keys_of_others_do_not_slow_a_look(tmp_path: Path) -> None:
    """Nothing that is read to see or to serve a Mesh walks the keyspace."""
    fill = "for i = 1, 100000 do redis.call('SET', ARGV[1] .. i, 1) end"
    with RedisServer() as server, server.client() as plain:
        for part in range(10):
            plain.eval(fill, 0, f"other:{part}:")
        assert plain.dbsize() == 1_000_000
        mesh = Mesh("test", settings=settings_for_tests(server.url))

        @mesh.task
        async def work(n: int) -> int:
            if n < 0:
                raise ValueError(n)
            return n

        plain.config_resetstat()
        async with mesh, mesh.worker():
            assert await (await work.submit(1)).result(timeout=5) == 1
            with pytest.raises(TaskFailed):
                await (await work.submit(-1)).result(timeout=5)
            await (await work.submit_in(60, 1)).cancel()
            [letter] = await mesh.dead_letters()
            await mesh.discard(letter)
            for _ in range(20):
                assert len((await snapshot(mesh)).workers) == 1
        stats = plain.info("commandstats")
        used = {name.removeprefix("cmdstat_").partition("|")[0] for name in stats}
        assert not {"keys", "scan", "randomkey", "sort"} & used
        seldom = {
            name: each["usec_per_call"] for name, each in stats.items() if each["usec_per_call"] > 20_000
        }
        assert not seldom, seldom


async def test_a_large_result_that_does_not_count_leaves_the_one_that_does(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    ledger = Ledger()
    mesh, other = make_mesh(observers=[ledger]), make_mesh()
    go = {1: asyncio.Event(), 2: asyncio.Event()}
    started: list[int] = []

    async def work(ctx: Context) -> bytes:
        started.append(ctx.deliveries)
        await go[ctx.deliveries].wait()
        return b"%d" % ctx.deliveries * (3 << 20)

    task, elsewhere = mesh.task(work), other.task(work)
    async with mesh, other, mesh.worker():
        handle = await task.submit()
        await wait_until(lambda: started == [1])
        async with mesh.worker() as second:
            hand_over(plain, second)
            await wait_until(lambda: started == [1, 2])
            go[2].set()
            await wait_until(lambda: plain.xlen(LANE) == 0)
            go[1].set()
            await wait_until(lambda: ledger.dropped == 1)
            assert await elsewhere.handle(handle.id).result(timeout=5) == b"2" * (3 << 20)
            await wait_until(lambda: len(plain.keys(PREFIX + "blob:*")) == 4)
