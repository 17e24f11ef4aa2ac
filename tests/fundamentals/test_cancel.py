"""Cancelling a task, whatever it is doing."""

from __future__ import annotations

import asyncio
import datetime
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis

from taskmesh import (
    Batch,
    Cancelled,
    Context,
    Mesh,
    Priority,
    Retry,
    TaskCancelled,
    TaskFailed,
    WorkerSettings,
)
from taskmesh.testing import KeyLeaks, wait_until
from tests.conftest import MakeMesh

PREFIX = "taskmesh:{test:default:0}:"


@asynccontextmanager
async def occupied(mesh: Mesh, concurrency: int = 1) -> AsyncIterator[asyncio.Event]:
    """A worker whose slots are all taken until the event is set."""
    release = asyncio.Event()
    started = 0

    async def occupy() -> None:
        nonlocal started
        started += 1
        await release.wait()

    task = mesh.task(occupy)
    async with mesh.worker(WorkerSettings(concurrency=concurrency)):
        await task.submit_many([task.bind() for _ in range(concurrency)])
        await wait_until(lambda: started == concurrency)
        yield release
        release.set()


async def test_a_queued_task_never_runs(mesh: Mesh, plain: redis.Redis) -> None:
    ran: list[int] = []

    @mesh.task
    async def work(n: int) -> None:
        ran.append(n)

    first, second = await work.submit_many([1, 2])
    assert await first.cancel() is Cancelled.CANCELLED
    with pytest.raises(TaskCancelled):
        await first.result(timeout=1)
    assert plain.xlen(PREFIX + "tasks:normal") == 1
    async with mesh.worker():
        await second.result(timeout=5)
    assert ran == [2]


async def test_a_running_handler_is_stopped(mesh: Mesh) -> None:
    started, stopped = asyncio.Event(), asyncio.Event()

    @mesh.task
    async def work() -> None:
        started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            stopped.set()
            raise

    async with mesh.worker():
        handle = await work.submit()
        await asyncio.wait_for(started.wait(), 5)
        assert await handle.cancel() is Cancelled.REQUESTED
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=5)
        assert stopped.is_set()


async def test_cancelling_is_heard_while_every_slot_is_taken(mesh: Mesh) -> None:
    started = asyncio.Event()

    @mesh.task
    async def work() -> None:
        started.set()
        await asyncio.sleep(60)

    async with mesh.worker(WorkerSettings(concurrency=1)):
        handle = await work.submit()
        await asyncio.wait_for(started.wait(), 5)
        await handle.cancel()
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=2)


async def test_a_handler_in_a_thread_is_told_and_its_result_dropped(mesh: Mesh) -> None:
    started, noticed = threading.Event(), threading.Event()

    @mesh.task
    def work(ctx: Context) -> str:
        started.set()
        give_up_at = time.monotonic() + 10
        while not ctx.cancelled and time.monotonic() < give_up_at:
            time.sleep(0.005)
        noticed.set()
        return "too late"

    async with mesh.worker():
        handle = await work.submit()
        await wait_until(started.is_set)
        assert await handle.cancel() is Cancelled.REQUESTED
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=5)
        await wait_until(noticed.is_set)


async def test_what_waits_in_a_worker_is_dropped(mesh: Mesh, plain: redis.Redis) -> None:
    ran = False

    @mesh.task
    async def work() -> None:
        nonlocal ran
        ran = True

    async with occupied(mesh) as release:
        handle = await work.submit()
        outcome = await handle.cancel()
        assert outcome in (Cancelled.CANCELLED, Cancelled.REQUESTED)
        release.set()
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=5)
    assert not ran


async def test_a_finished_task_cannot_be_cancelled(mesh: Mesh) -> None:
    @mesh.task
    async def work() -> int:
        return 1

    async with mesh.worker():
        handle = await work.submit()
        assert await handle.result(timeout=5) == 1
        assert await handle.cancel() is Cancelled.ENDED
        assert await handle.result(timeout=5) == 1


async def test_a_task_that_waits_for_its_next_try_does_not_get_it(mesh: Mesh, plain: redis.Redis) -> None:
    tries = 0

    @mesh.task(retry=Retry(attempts=5, delay=0.5, jitter=0))
    async def flaky() -> None:
        nonlocal tries
        tries += 1
        raise OSError

    async with mesh.worker():
        handle = await flaky.submit()
        await wait_until(lambda: plain.zcard(PREFIX + "delayed") == 1)
        assert await handle.cancel() is Cancelled.REQUESTED
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=5)
    assert tries == 1


async def test_a_row_of_a_batch_is_dropped_and_the_others_go_on(mesh: Mesh) -> None:
    started = asyncio.Event()

    @mesh.task(batch=Batch(max_rows=3, max_wait=1))
    async def double(rows: list[int]) -> list[int]:
        started.set()
        await asyncio.sleep(0.1)
        return [2 * row for row in rows]

    async with mesh.worker():
        first, second, third = await double.submit_many([1, 2, 3])
        await asyncio.wait_for(started.wait(), 5)
        await second.cancel()
        with pytest.raises(TaskCancelled):
            await second.result(timeout=5)
        assert await first.result(timeout=5) == 2
        assert await third.result(timeout=5) == 6


async def test_a_task_is_cancelled_while_its_large_arguments_are_on_their_way(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(inline_limit_bytes=100)
    ran = False

    @mesh.task
    async def work(data: bytes) -> None:
        nonlocal ran
        ran = True

    async with mesh:
        handle = await work.submit(b"x" * 1000)
        elsewhere = work.handle(handle.id)  # it does not know the place, so that the worker has to be told
        assert await elsewhere.cancel() is Cancelled.REQUESTED
        async with mesh.worker():
            with pytest.raises(TaskCancelled):
                await handle.result(timeout=5)
    assert not ran


async def test_the_waiter_being_cancelled_does_not_cancel_the_task(mesh: Mesh) -> None:
    @mesh.task
    async def work() -> int:
        await asyncio.sleep(0.1)
        return 1

    async with mesh.worker():
        handle = await work.submit()
        waiter = asyncio.create_task(handle.result(timeout=5))
        await asyncio.sleep(0.01)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        assert await handle.result(timeout=5) == 1


@pytest.mark.parametrize("batch", [None, Batch(max_rows=4)])
async def test_a_handler_that_fails_while_it_is_stopped_gets_no_other_try(
    mesh: Mesh, batch: Batch | None
) -> None:
    started = 0

    async def clumsy(_: Any) -> Any:
        nonlocal started
        started += 1
        try:
            await asyncio.sleep(30)
        finally:
            raise OSError("while tidying up")

    retry = Retry(attempts=3, delay=0.0)
    task = mesh.task(retry=retry)(clumsy) if batch is None else mesh.task(retry=retry, batch=batch)(clumsy)
    async with mesh.worker():
        handle = await task.submit(1)
        await wait_until(lambda: started == 1)
        await handle.cancel()
        with pytest.raises(TaskFailed, match="while tidying up"):
            await handle.result(timeout=5)
    assert started == 1


async def test_the_chunks_of_one_of_many_go_with_it(mesh: Mesh, redis_url: str) -> None:
    @mesh.task
    async def size(data: bytes) -> int:
        return len(data)

    with KeyLeaks(redis_url):
        handles = await size.submit_many([b"small", b"x" * 300_000, b"small"])
        for handle in (handles[0], handles[-2], handles[2]):
            assert await handle.cancel() is Cancelled.CANCELLED


async def test_one_of_many_that_are_due_together_is_found(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task
    async def work(n: int) -> None:
        pass

    when = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    handles = [await work.submit_at(when, n) for n in range(20)]
    high = work.options(priority=Priority.HIGH)
    handles += [await high.submit_at(when, n) for n in range(5)]
    for handle in (handles[0], handles[7], handles[19], handles[24]):
        assert await handle.cancel() is Cancelled.CANCELLED
    assert plain.zcard(PREFIX + "delayed") == 21
    assert await handles[7].cancel() is Cancelled.ENDED
    assert plain.zcard(PREFIX + "delayed") == 21


async def test_a_mark_that_nobody_takes_goes_by_itself(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task
    async def work() -> None:
        pass

    assert await work.handle("nobodyknows000000001").cancel() is Cancelled.REQUESTED
    assert plain.pttl(PREFIX + "cancelled") > 0
