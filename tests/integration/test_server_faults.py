"""Servers that are killed, frozen, emptied and full.

A ledger outside Redis says what was executed; the handles say how it ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest
import redis

from taskmesh import BrokerFull, Mesh
from taskmesh.testing import RedisServer, wait_until
from tests.conftest import MakeMesh, settings_for_tests
from tests.integration.fault_fleet import TTL


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
