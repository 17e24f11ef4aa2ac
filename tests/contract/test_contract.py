"""What taskmesh promises, the same on every topology. Three queues, so that a cluster's nodes all have their part."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from taskmesh import (
    Batch,
    Cancelled,
    Context,
    Mesh,
    Priority,
    QueueFull,
    QueueOptions,
    Retry,
    Task,
    TaskCancelled,
    TaskFailed,
    WorkerSettings,
)
from taskmesh.keys import GROUP
from taskmesh.settings import MIB
from taskmesh.testing import Point, fail_at, wait_until
from tests.conftest import LIVENESS_TTL

QUEUES = ("red", "green", "blue")
SHORT_TTL = 0.5
Connect = Callable[..., Mesh]


def on_each_queue(mesh: Mesh, function: Callable[..., Any], **options: Any) -> list[Task[..., Any]]:
    """The same handler as a task of each queue."""
    return [mesh.task(name=f"work-{queue}", queue=queue, **options)(function) for queue in QUEUES]


async def test_submit_and_result(connect: Connect) -> None:
    mesh = connect()

    async def add(a: int, b: int) -> int:
        return a + b

    tasks = on_each_queue(mesh, add)
    async with mesh, mesh.worker():
        for task in tasks:
            assert await (await task.submit(1, 2)).result(timeout=5) == 3


async def test_bulk_over_all_lanes(connect: Connect) -> None:
    mesh = connect()

    async def same(n: int) -> int:
        return n

    tasks = on_each_queue(mesh, same)
    async with mesh, mesh.worker():
        for task in tasks:
            for lane in Priority:
                handles = await task.options(priority=lane).submit_many(range(1500))
                assert [await handle.result(timeout=20) for handle in handles] == list(range(1500))


async def test_failure_retry_dead_letter_and_requeue(connect: Connect) -> None:
    mesh = connect()
    broken = True

    async def work(ctx: Context) -> int:
        if broken:
            raise OSError(f"attempt {ctx.attempt}")
        return ctx.attempt

    tasks = on_each_queue(mesh, work, retry=Retry(attempts=2, delay=0.05))
    async with mesh, mesh.worker():
        for task, queue in zip(tasks, QUEUES, strict=True):
            broken = True
            handle = await task.submit()
            with pytest.raises(TaskFailed, match="attempt 2"):
                await handle.result(timeout=5)
            [letter] = await mesh.dead_letters(queue)
            assert letter.message is not None
            broken = False
            assert await mesh.requeue(letter)
            assert await task.handle(handle.id).result(timeout=5) == 1
            assert await mesh.dead_letters(queue) == []


async def test_dead_letters_can_be_discarded(connect: Connect) -> None:
    mesh = connect()

    async def work() -> None:
        raise ValueError

    tasks = on_each_queue(mesh, work)
    async with mesh, mesh.worker():
        for task, queue in zip(tasks, QUEUES, strict=True):
            await (await task.submit()).outcome(timeout=5)
            [letter] = await mesh.dead_letters(queue)
            assert await mesh.discard(letter)
            assert await mesh.dead_letters(queue) == []


async def test_delayed_tasks_start_when_due(connect: Connect) -> None:
    mesh = connect()

    async def when() -> float:
        return time.monotonic()

    tasks = on_each_queue(mesh, when)
    async with mesh, mesh.worker():
        submitted = time.monotonic()
        handles = [await task.submit_in(0.2) for task in tasks]
        for handle in handles:
            assert 0.2 <= await handle.result(timeout=5) - submitted < 0.6


async def test_cancelling_queued_delayed_and_running_tasks(connect: Connect) -> None:
    mesh = connect()
    running = asyncio.Event()

    async def work() -> None:
        running.set()
        await asyncio.sleep(60)

    tasks = on_each_queue(mesh, work)
    async with mesh:
        for task in tasks:
            queued, delayed = await task.submit(), await task.submit_in(60)
            assert await queued.cancel() is Cancelled.CANCELLED
            assert await delayed.cancel() is Cancelled.CANCELLED
            for handle in (queued, delayed):
                with pytest.raises(TaskCancelled):
                    await handle.result(timeout=5)
        async with mesh.worker():
            for task in tasks:
                running.clear()
                handle = await task.submit()
                await asyncio.wait_for(running.wait(), 5)
                assert await handle.cancel() is Cancelled.REQUESTED
                with pytest.raises(TaskCancelled):
                    await handle.result(timeout=5)


async def test_blobs(connect: Connect) -> None:
    mesh = connect()

    async def double(data: bytes) -> bytes:
        return data * 2

    tasks = on_each_queue(mesh, double)
    async with mesh, mesh.worker():
        for task in tasks:
            data = bytes(range(256)) * 8192
            assert len(data) == 2 * MIB
            assert await (await task.submit(data)).result(timeout=20) == data * 2


async def test_batches(connect: Connect) -> None:
    mesh = connect()

    async def double(rows: list[int]) -> list[int]:
        return [2 * row for row in rows]

    tasks = on_each_queue(mesh, double, batch=Batch(max_rows=16, max_wait=0.01))
    async with mesh, mesh.worker():
        for task in tasks:
            handles = await task.submit_many(range(100))
            assert [await handle.result(timeout=5) for handle in handles] == [2 * n for n in range(100)]


async def test_the_work_of_a_worker_that_dies_goes_on_within_the_ttl(connect: Connect) -> None:
    """At each point, in four applications side by side."""
    await asyncio.gather(*(die_at(point, connect(f"-{point}"), connect(f"-{point}")) for point in Point))


async def die_at(point: Point, mesh: Mesh, other: Mesh) -> None:
    """A worker dies there with messages of three queues in its hands; two others end them, each once."""
    runs: Counter[tuple[str, int]] = Counter()

    async def work(ctx: Context, n: int) -> tuple[int, int]:
        runs[ctx.queue, n] += 1
        return n, ctx.deliveries

    tasks = on_each_queue(mesh, work)
    on_each_queue(other, work)
    async with mesh, other, mesh.worker() as victim:
        fail_at(victim, point)
        async with other.worker(WorkerSettings(concurrency=1)):
            await asyncio.sleep(2 * LIVENESS_TTL / 10)  # it has seen the victim's lease
        handles = [await task.submit(n) for task in tasks for n in range(3)]
        died = time.monotonic()
        async with other.worker(), other.worker():
            results = [await handle.result(timeout=10) for handle in handles]
            took = time.monotonic() - died
            for queue in QUEUES:
                await wait_until(lambda queue=queue: are_the_only_ones(other, queue, 2))
        assert mesh.client.repeats == 0
        assert await lasting_keys(mesh) == []
    assert [n for n, _ in results] == [0, 1, 2] * 3
    assert {deliveries for _, deliveries in results} <= {1, 2}
    assert set(runs.values()) <= {1, 2}
    assert took < LIVENESS_TTL * 2 + 0.6, f"{point}: reclaiming took too long"


async def are_the_only_ones(mesh: Mesh, queue: str, count: int) -> bool:
    """So many workers are on the queue's list, and no lane has a consumer besides."""
    partition = mesh.client.partition(queue)
    keys, command = partition.keys, partition.caller.command
    workers = set(await command(keys.tag, "ZRANGE", keys.workers, 0, -1))
    for lane in keys.lanes:
        rows = await command(keys.tag, "XINFO", "CONSUMERS", lane, GROUP)
        if not {row[1] for row in rows} <= workers:
            return False
    return len(workers) == count


async def lasting_keys(mesh: Mesh) -> list[bytes]:
    """Streams and lists of workers that are still there."""
    found: list[bytes] = []
    for queue in QUEUES:
        partition = mesh.client.partition(queue)
        keys, command = partition.keys, partition.caller.command
        found += [key for key in (*keys.lanes, keys.workers) if await command(keys.tag, "EXISTS", key)]
    return found


async def test_a_dead_workers_entries_restart_within_the_ttl_and_one_look(connect: Connect) -> None:
    mesh, other = connect(liveness_ttl=SHORT_TTL), connect(liveness_ttl=SHORT_TTL)
    started: list[float] = []
    victim_has_it = asyncio.Event()

    async def hold(ctx: Context) -> int:
        started.append(time.monotonic())
        if ctx.deliveries == 1:
            victim_has_it.set()
            await asyncio.sleep(60)
        return ctx.deliveries

    task = mesh.task(queue="red")(hold)
    other.task(queue="red")(hold)
    async with mesh, other, mesh.worker() as victim:
        handle = await task.submit()
        await asyncio.wait_for(victim_has_it.wait(), 5)
        async with other.worker():
            await asyncio.sleep(SHORT_TTL)  # the survivor watches
            assert len(started) == 1
            victim.abandon()
            died = time.monotonic()
            assert await handle.result(timeout=5) == 2
    assert started[1] - died <= SHORT_TTL + 0.3


async def test_a_live_owner_keeps_its_work_for_many_leases(connect: Connect) -> None:
    """Its loop is blocked all the while, and a delayed message holds no lease."""
    mesh, owner = connect(liveness_ttl=SHORT_TTL), connect(liveness_ttl=SHORT_TTL)
    started: list[str] = []
    ended = threading.Event()

    async def sleep(ctx: Context) -> int:
        started.append(ctx.queue)
        await asyncio.sleep(3 * SHORT_TTL)
        return ctx.deliveries

    async def block(ctx: Context) -> int:
        started.append(ctx.queue)
        time.sleep(3 * SHORT_TTL)  # noqa: ASYNC251 - what users should not do, and do
        return ctx.deliveries

    async def own() -> None:
        async with owner.worker():
            await asyncio.to_thread(ended.wait)

    async def quick(ctx: Context) -> int:
        started.append(ctx.queue)
        return ctx.deliveries

    for queue, handler in zip(QUEUES, (sleep, block, quick), strict=True):
        mesh.task(name=queue, queue=queue)(handler)
        owner.task(name=queue, queue=queue)(handler)
    async with mesh:
        owning = asyncio.create_task(asyncio.to_thread(asyncio.run, own()))
        handles = [await mesh.get_task("red").submit(), await mesh.get_task("blue").submit_in(3 * SHORT_TTL)]
        await wait_until(lambda: started == ["red"])
        handles.append(await mesh.get_task("green").submit())
        await wait_until(lambda: started == ["red", "green"])
        async with mesh.worker():
            assert [await handle.result(timeout=5) for handle in handles] == [1, 1, 1]
        ended.set()
        await owning
        assert mesh.client.repeats == 0
    assert started == ["red", "green", "blue"]


async def test_a_drain_hands_back_what_was_not_started_uncounted(connect: Connect) -> None:
    mesh, other = connect(), connect()
    release = asyncio.Event()
    started: list[int] = []

    async def work(ctx: Context, n: int) -> int:
        started.append(n)
        await release.wait()
        return ctx.deliveries

    tasks = on_each_queue(mesh, work)
    on_each_queue(other, work)
    async with mesh, other:
        async with mesh.worker(WorkerSettings(concurrency=2, drain_timeout=5)) as worker:
            handles = [handle for task in tasks for handle in await task.submit_many(range(5))]
            await wait_until(lambda: len(started) == 2)
            stopping = asyncio.create_task(worker.stop())
            await asyncio.sleep(0)
            release.set()
            await stopping
        began = time.monotonic()
        async with other.worker():
            assert {await handle.result(timeout=5) for handle in handles} == {1}
    assert time.monotonic() - began < LIVENESS_TTL


async def test_a_bounded_queue_refuses_or_waits(connect: Connect) -> None:
    bounds = {
        "red": QueueOptions(max_length=2, when_full="reject"),
        "green": QueueOptions(max_length=2),
        "blue": QueueOptions(max_length=2, wait_timeout=0.1),
    }
    mesh = connect(queues=bounds)

    async def same(n: int) -> int:
        return n

    red, green, blue = on_each_queue(mesh, same)
    async with mesh:
        with pytest.raises(QueueFull):
            await red.submit_many(range(3))
        with pytest.raises(QueueFull, match="after"):
            await blue.submit_many(range(3))
        waiting = asyncio.create_task(green.submit_many(range(50)))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        async with mesh.worker():
            assert [await handle.result(timeout=10) for handle in await waiting] == list(range(50))


async def test_a_parked_task_is_released_to_a_worker_that_knows_it(connect: Connect) -> None:
    old, new = connect(), connect()
    for queue in QUEUES:

        @old.task(name=f"old-{queue}", queue=queue)
        async def known() -> None: ...

    async def same(n: int) -> int:
        return n

    tasks = on_each_queue(new, same)
    async with old, new, old.worker():
        handles = [await task.submit(n) for n, task in enumerate(tasks)]
        for queue in QUEUES:
            await wait_until(lambda queue=queue: old.dead_letters(queue))
            assert [letter.reason for letter in await old.dead_letters(queue)] == ["no handler"]
        async with new.worker():
            assert [await handle.result(timeout=5) for handle in handles] == [0, 1, 2]


async def test_undecodable_entries_are_kept_with_their_bytes(connect: Connect) -> None:
    mesh = connect()

    async def fine() -> None: ...

    on_each_queue(mesh, fine)
    async with mesh, mesh.worker():
        for queue in QUEUES:
            partition = mesh.client.partition(queue)
            await partition.caller.command(
                partition.keys.tag, "XADD", partition.keys.lanes[0], "*", "message", b"garbage"
            )
            await wait_until(lambda queue=queue: mesh.dead_letters(queue))
            assert [letter.raw for letter in await mesh.dead_letters(queue)] == [b"garbage"]
