"""Leases: who runs keeps its work, whatever its event loop does; who is gone loses it soon."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time

import pytest
import redis

from taskmesh import Context, WorkerSettings
from taskmesh.events import Event, WorkerLost
from taskmesh.testing import MovableClock, RedisServer, wait_until
from taskmesh.worker.heartbeat import EXIT_BLOCKED
from tests.conftest import MakeMesh

TTL = 0.5
PREFIX = "taskmesh:{test:default:0}:"


async def test_a_task_longer_than_the_lease_runs_once(make_mesh: MakeMesh) -> None:
    meshes = [make_mesh(liveness_ttl=TTL) for _ in range(2)]
    runs = 0

    async def long() -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(TTL * 4)
        return runs

    task, _ = [mesh.task(long) for mesh in meshes]
    async with meshes[0], meshes[1].worker(), meshes[0].worker():
        assert await (await task.submit()).result(timeout=10) == 1
    assert runs == 1


def start(program: str, url: str) -> subprocess.Popen[bytes]:
    """A worker process that prints a line when it is ready."""
    environment = {**os.environ, "TASKMESH_URL": url, "TASKMESH_LIVENESS_TTL": str(TTL)}
    return subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE)


BLOCKER = """
import asyncio, sys, time
from taskmesh import Context, Mesh

mesh = Mesh("test")

@mesh.task
async def block(ctx: Context, seconds: float) -> int:
    time.sleep(seconds)
    return ctx.deliveries

async def main():
    async with mesh.worker():
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_a_handler_that_blocks_the_loop_keeps_its_lease(
    make_mesh: MakeMesh, redis_url: str, plain: redis.Redis
) -> None:
    mesh = make_mesh(liveness_ttl=TTL)
    runs = 0

    @mesh.task
    async def block(seconds: float) -> int:
        nonlocal runs
        runs += 1
        return 99

    process = start(BLOCKER, redis_url)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        async with mesh:
            handle = await block.submit(TTL * 4)
            await wait_until(lambda: plain.xpending(PREFIX + "tasks:normal", "workers")["pending"] == 1)
            async with mesh.worker():  # idle, and watching
                assert await handle.result(timeout=10) == 1
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    assert runs == 0


SLOW = """
import asyncio, time
from taskmesh import Mesh, WorkerSettings

mesh = Mesh("test")

@mesh.task(timeout=0.1)
async def quick() -> None: ...

@mesh.task
async def slow() -> str:
    await asyncio.sleep(0.5)
    time.sleep(1.5)
    return "in its own time"

async def main():
    async with mesh.worker(WorkerSettings(loop_grace=0.3)):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def test_the_limit_of_a_handler_that_has_ended_holds_for_no_other(
    make_mesh: MakeMesh, redis_url: str
) -> None:
    mesh = make_mesh(liveness_ttl=TTL)

    @mesh.task
    async def quick() -> None: ...

    @mesh.task
    async def slow() -> str:
        return "elsewhere"

    process = start(SLOW, redis_url)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        async with mesh:
            handle = await slow.submit()
            await asyncio.sleep(0.1)
            await (await quick.submit()).result(timeout=5)
            assert await handle.result(timeout=5) == "in its own time"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


WEDGED = """
import asyncio, time
from taskmesh import Context, Mesh, WorkerSettings

mesh = Mesh("test")

@mesh.task(timeout=0.2)
async def wedge(ctx: Context, suspends: bool) -> None:
    if suspends:
        await asyncio.sleep(0.01)
    time.sleep(60)

async def main():
    async with mesh.worker(WorkerSettings(loop_grace=0.3)):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("suspends", [False, True], ids=["at its start", "after an await"])
async def test_a_loop_blocked_past_timeout_and_grace_ends_the_process(
    make_mesh: MakeMesh, redis_url: str, suspends: bool
) -> None:
    mesh = make_mesh(liveness_ttl=TTL)

    @mesh.task
    async def wedge(suspends: bool) -> str:
        return "elsewhere"

    process = start(WEDGED, redis_url)
    try:
        assert process.stdout is not None
        await asyncio.to_thread(process.stdout.readline)
        async with mesh:
            handle = await wedge.submit(suspends)
            assert await asyncio.to_thread(process.wait, 10) == EXIT_BLOCKED
            async with mesh.worker():
                assert await handle.result(timeout=10) == "elsewhere"
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_clocks_that_are_minutes_apart_decide_nothing(make_mesh: MakeMesh) -> None:
    class Skewed(MovableClock):
        """A machine whose own clock runs ahead: Redis time is not touched."""

        def monotonic(self) -> float:
            return time.monotonic() + 300

    mesh, ahead = make_mesh(liveness_ttl=TTL), make_mesh(liveness_ttl=TTL, clock=Skewed())
    runs = 0

    async def work() -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(TTL * 2)
        return runs

    task = mesh.task(work)
    ahead.task(work)
    async with mesh, mesh.worker(), ahead.worker():
        assert await (await task.options(expires=60).submit()).result(timeout=10) == 1


async def test_a_worker_that_finds_itself_struck_off_goes_on_under_a_new_name(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    class Losses:
        def __init__(self) -> None:
            self.workers: list[str] = []

        def on_event(self, event: Event) -> None:
            if isinstance(event, WorkerLost):
                self.workers.append(event.worker)

    losses = Losses()
    mesh = make_mesh(liveness_ttl=TTL, observers=[losses])

    @mesh.task
    async def who(ctx: Context) -> str:
        return ctx.worker

    async with mesh, mesh.worker() as worker:
        name = worker.worker.decode()
        assert await (await who.submit()).result(timeout=5) == name
        plain.zrem(PREFIX + "workers", name)
        await wait_until(lambda: losses.workers == [name])
        new = await (await who.submit()).result(timeout=10)
        assert new != name
        await wait_until(lambda: plain.zrange(PREFIX + "workers", 0, -1) == [new.encode()])


async def test_consumers_stay_bounded_over_many_deaths(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    mesh = make_mesh(liveness_ttl=TTL)
    held = 0

    @mesh.task
    async def work(ctx: Context) -> int:
        nonlocal held
        if ctx.deliveries == 1:
            held += 1
            await asyncio.sleep(60)
        return ctx.deliveries

    handles = []
    async with mesh:
        for n in range(1, 31):
            async with mesh.worker(WorkerSettings(concurrency=1)) as victim:
                if n % 3 == 0:  # some hold an entry when they die
                    handles.append(await work.submit())
                    await wait_until(lambda n=n: held == n // 3)
                victim.abandon()
        async with mesh.worker() as survivor:
            assert [await handle.result(timeout=20) for handle in handles] == [2] * 10
            names = [survivor.worker]
            await wait_until(lambda: plain.zrange(PREFIX + "workers", 0, -1) == names)
            consumers = plain.xinfo_consumers(PREFIX + "tasks:normal", "workers")
            assert {consumer["name"] for consumer in consumers} <= set(names)
            assert plain.hkeys(PREFIX + "known") == names
            assert len(plain.keys(PREFIX + "settles:*")) <= 1


async def test_entries_of_a_consumer_without_a_lease_are_found(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(liveness_ttl=TTL)

    @mesh.task
    async def work(ctx: Context) -> int:
        return ctx.deliveries

    async with mesh, mesh.worker() as worker:
        await worker.stop()
        handle = await work.submit()
        stream = PREFIX + "tasks:normal"
        if not plain.exists(stream) or not plain.xinfo_groups(stream):
            plain.xgroup_create(stream, "workers", "0", mkstream=True)
        plain.xreadgroup("workers", "ghost", {stream: ">"})
        async with mesh.worker():
            assert await handle.result(timeout=10) == 2


async def test_a_cut_heartbeat_connection_does_not_cost_the_lease(
    make_mesh: MakeMesh, server: RedisServer, plain: redis.Redis
) -> None:
    meshes = [make_mesh(liveness_ttl=TTL) for _ in range(2)]
    runs = 0

    async def long() -> int:
        nonlocal runs
        runs += 1
        await asyncio.sleep(TTL * 4)
        return runs

    task, _ = [mesh.task(long) for mesh in meshes]
    async with meshes[0], meshes[1].worker(), meshes[0].worker():
        handle = await task.submit()
        for _ in range(6):
            await asyncio.sleep(TTL / 2)
            plain.client_kill_filter(_type="normal", skipme=True)
        assert await handle.result(timeout=10) == 1
    assert runs == 1
