"""A worker that stops finishes or hands back all that it holds; what was not started counts as never delivered."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import redis

from taskmesh import Batch, BrokerUnavailable, Context, Mesh, WorkerSettings
from taskmesh.testing import KeyLeaks, RedisServer, wait_until
from tests.conftest import MakeMesh, settings_for_tests

PREFIX = "taskmesh:{test:default:0}:"


async def test_running_handlers_finish_and_the_rest_goes_back_uncounted(
    mesh: Mesh, make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    release = asyncio.Event()
    started: list[int] = []

    async def work(ctx: Context, n: int) -> tuple[int, int]:
        started.append(n)
        await release.wait()
        return n, ctx.deliveries

    task = mesh.task(work)
    other = make_mesh()
    other.task(work)
    async with mesh.worker(WorkerSettings(concurrency=3, fetch_ahead=10)) as worker:
        handles = await task.submit_many(range(10))
        await wait_until(lambda: len(started) == 3)
        stopping = asyncio.create_task(worker.stop())
        await wait_until(lambda: plain.xpending(PREFIX + "tasks:normal", "workers")["pending"] == 3)
        release.set()
        await stopping
    assert plain.zscore(PREFIX + "workers", worker.worker) is None
    began = time.monotonic()
    async with other, other.worker():
        results = [await handle.result(timeout=5) for handle in handles]
    assert results == [(n, 1) for n in range(10)]
    assert time.monotonic() - began < 0.9  # at once, not after the liveness TTL


async def test_handlers_that_do_not_finish_in_time_are_cancelled_and_handed_back(
    mesh: Mesh, make_mesh: MakeMesh
) -> None:
    runs: list[int] = []

    async def work(ctx: Context) -> int:
        runs.append(ctx.deliveries)
        if len(runs) == 1:
            await asyncio.sleep(60)
        return ctx.deliveries

    task = mesh.task(work)
    other = make_mesh()
    other.task(work)
    async with mesh.worker(WorkerSettings(drain_timeout=0.1)):
        handle = await task.submit()
        await wait_until(lambda: runs)
    async with other, other.worker():
        assert await handle.result(timeout=0.9) == 1
    assert runs == [1, 1]


async def test_a_handler_in_a_thread_is_handed_back_and_its_late_end_does_no_harm(
    mesh: Mesh, make_mesh: MakeMesh
) -> None:
    release = threading.Event()
    runs: list[str] = []

    def work() -> str:
        runs.append("run")
        if len(runs) == 1:
            release.wait(10)
            return "first"
        return "second"

    task = mesh.task(work)
    other = make_mesh()
    other.task(work)
    async with mesh.worker(WorkerSettings(drain_timeout=0.05)):
        handle = await task.submit()
        await wait_until(lambda: runs)
    release.set()
    async with other, other.worker():
        assert await handle.result(timeout=0.9) == "second"


async def test_rows_that_wait_for_their_batch_and_arguments_on_their_way_go_back(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(inline_limit_bytes=1000)

    @mesh.task(batch=Batch(max_rows=100, max_wait=60))
    async def rows(items: list[int]) -> list[int]:
        return items

    @mesh.task
    async def large(data: bytes) -> int:
        return len(data)

    stream = PREFIX + "tasks:normal"
    async with mesh:
        async with mesh.worker(WorkerSettings(drain_timeout=0.5)):
            await rows.submit_many(range(5))
            await wait_until(lambda: plain.xpending(stream, "workers")["pending"] == 5)
            await large.submit(b"x" * 2_000_000)
        assert plain.xlen(stream) >= 5
        entries = plain.xpending_range(stream, "workers", "-", "+", 100)
        assert {entry["consumer"] for entry in entries} == {b"returned"}
        assert {entry["times_delivered"] for entry in entries} == {0}


async def test_a_stopped_worker_leaves_no_consumer_and_no_key(
    mesh: Mesh, plain: redis.Redis, redis_url: str
) -> None:
    @mesh.task(result_ttl=0)
    async def work() -> None: ...

    with KeyLeaks(redis_url):
        for _ in range(20):
            async with mesh.worker():
                await work.submit_many([work.bind() for _ in range(10)])
                await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)
    for key in plain.keys(PREFIX + "tasks:*"):
        assert plain.xinfo_consumers(key, "workers") == []
    assert not plain.exists(PREFIX + "workers", PREFIX + "known")


async def test_an_idle_worker_stops_at_once(mesh: Mesh) -> None:
    @mesh.task
    async def work() -> None: ...

    for _ in range(10):
        async with mesh.worker():
            await (await work.submit()).result(timeout=5)
            began = time.monotonic()
        assert time.monotonic() - began < 1


async def test_a_worker_stops_in_time_with_the_server_gone(free_server: RedisServer) -> None:
    mesh = Mesh("test", settings=settings_for_tests(free_server.url, retry_for=0.5))
    started = asyncio.Event()

    @mesh.task
    async def work() -> None:
        started.set()
        await asyncio.sleep(0.2)

    began = 0.0
    async with mesh, mesh.worker(WorkerSettings(drain_timeout=0.5)):
        await work.submit()
        await started.wait()
        free_server.kill()
        began = time.monotonic()
    assert time.monotonic() - began < 10


async def test_a_worker_that_cannot_enter_all_its_queues_enters_none(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task(queue="one")
    async def one() -> None: ...

    @mesh.task(queue="two")
    async def two() -> None: ...

    plain.set("taskmesh:{test:two:0}:workers", "not a sorted set")
    with pytest.raises(Exception, match="WRONGTYPE"):
        async with mesh.worker():
            pass
    assert not plain.exists("taskmesh:{test:one:0}:workers")


async def test_no_server_says_so(free_server: RedisServer) -> None:
    free_server.kill()
    mesh = Mesh("test", settings=settings_for_tests(free_server.url, retry_for=0.2))
    with pytest.raises(BrokerUnavailable, match="no answer"):
        async with mesh:
            pass


async def test_whoever_stops_it_again_waits_for_the_drain(mesh: Mesh) -> None:
    started = asyncio.Event()
    finished = False

    @mesh.task
    async def work() -> None:
        nonlocal finished
        started.set()
        await asyncio.sleep(0.5)
        finished = True

    async with mesh.worker() as worker:
        await work.submit()
        await started.wait()
        stopping = asyncio.create_task(worker.stop())
        await asyncio.sleep(0)
    assert finished
    await stopping
