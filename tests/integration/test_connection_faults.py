"""Replies that are lost, and connections that are cut.

A ledger outside Redis says what was executed; the handles say how it ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest
import redis

from taskmesh import Mesh, Priority, TaskFailed, WorkerSettings
from taskmesh.broker.scripts import CLAIM, FETCH, SETTLE, SUBMIT
from taskmesh.messages import Status
from taskmesh.testing import Proxy, RedisServer, wait_until
from tests.conftest import MakeMesh, settings_for_tests
from tests.integration.fault_fleet import PREFIX, TTL

# Replies that are lost


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


async def test_a_submit_whose_reply_was_lost_is_not_refused_by_a_server_that_is_full_by_then(
    free_server: RedisServer,
) -> None:
    async with Proxy(free_server.port) as proxy:
        mesh = Mesh("test", settings=settings_for_tests(proxy.url, retry_for=5.0))

        @mesh.task
        async def work(n: int) -> int:
            return n

        def fill_when_cut() -> bool:
            """The first try is in; before the second one there is no memory left."""
            return proxy.cuts == 1 and bool(free_server.command("CONFIG", "SET", "maxmemory", 1))

        async with mesh:
            await (await work.submit(0)).cancel()
            proxy.cut_reply_after(SUBMIT.sha)
            submitted = asyncio.create_task(work.submit(1))
            await wait_until(fill_when_cut)
            handle = await submitted
            assert free_server.command("XLEN", "taskmesh:{test:default:0}:tasks:normal") == 1
            free_server.command("CONFIG", "SET", "maxmemory", 0)
            async with mesh.worker():
                assert await handle.result(timeout=5) == 1


async def test_a_large_result_is_read_though_replies_are_lost(proxy: Proxy, make_mesh: MakeMesh) -> None:
    here, there = make_mesh(), make_mesh(url=proxy.url)

    async def large() -> bytes:
        return b"x" * 3_000_000

    here.task(large)
    task = there.task(large)
    async with there, here.worker():
        proxy.cut_reply_after(b"GETRANGE", times=2)
        handle = await task.submit()
        assert len(await handle.result(timeout=10)) == 3_000_000
        assert proxy.cuts == 2


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
