"""When a message is started: priorities, delays, and how much a worker takes at once."""

from __future__ import annotations

import asyncio
import datetime
import time

import pytest
import redis

from taskmesh import Cancelled, InvalidArguments, Mesh, Priority, TaskCancelled, WorkerSettings
from taskmesh.testing import MovableClock, wait_until
from tests.conftest import MakeMesh

PREFIX = "taskmesh:{test:default:0}:"


async def test_an_urgent_task_among_a_flood_is_next_and_the_flood_still_progresses(mesh: Mesh) -> None:
    order: list[str] = []

    @mesh.task(priority=Priority.LOW)
    async def work(what: str) -> None:
        order.append(what)
        await asyncio.sleep(0.005)

    flood = await work.submit_many([f"low {n}" for n in range(300)])
    async with mesh.worker(WorkerSettings(concurrency=1)):
        await wait_until(lambda: len(order) >= 20)
        before = len(order)
        urgent = await work.options(priority=Priority.HIGH).submit("urgent")
        await urgent.result(timeout=5)
        started_at = order.index("urgent")
        assert started_at - before <= 10, "it waited for more than a little of what was fetched already"
        for handle in flood:
            await handle.result(timeout=10)


async def test_urgent_work_without_end_does_not_starve_the_rest(mesh: Mesh) -> None:
    low_done = asyncio.Event()

    @mesh.task
    async def work(low: bool) -> None:
        await asyncio.sleep(0.002)
        if low:
            low_done.set()

    urgent = work.options(priority=Priority.HIGH)
    await urgent.submit_many([False] * 3000)
    await work.options(priority=Priority.LOW).submit(True)
    async with mesh.worker(WorkerSettings(concurrency=1, drain_timeout=0)) as worker:
        await asyncio.wait_for(low_done.wait(), 3)
        await worker.stop(0)


async def test_lanes_share_a_busy_worker_by_weight(mesh: Mesh) -> None:
    order: list[Priority] = []

    @mesh.task
    async def work(lane: Priority) -> None:
        order.append(lane)

    for lane in Priority:
        await work.options(priority=lane).submit_many([lane] * 320)
    async with mesh.worker(WorkerSettings(concurrency=16, max_fetch=16, fetch_ahead=0)):
        await wait_until(lambda: len(order) == 960)
    first = order[:320]
    counts = [first.count(lane) for lane in Priority]
    assert counts[0] > counts[1] > counts[2] > 0
    assert counts[0] >= 200


async def test_a_delayed_task_starts_when_it_is_due(mesh: Mesh) -> None:
    @mesh.task
    async def when() -> float:
        return time.monotonic()

    async with mesh.worker():
        submitted = time.monotonic()
        late = await when.submit_in(0.3)
        soon = await when.submit_in(0.1)
        assert 0.1 <= await soon.result(timeout=5) - submitted < 0.25
        assert 0.3 <= await late.result(timeout=5) - submitted < 0.45


async def test_a_task_can_wait_for_a_time_of_day_and_redis_decides(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    clock = MovableClock()
    mesh = make_mesh(clock=clock)

    @mesh.task
    async def tick(n: int) -> int:
        return n

    async with mesh:
        seconds, _ = plain.time()
        tomorrow = datetime.datetime.fromtimestamp(seconds, datetime.UTC) + datetime.timedelta(days=1)
        handle = await tick.submit_at(tomorrow, 1)
        with pytest.raises(InvalidArguments, match="no time zone"):
            await tick.submit_at(tomorrow.replace(tzinfo=None), 1)
        with pytest.raises(InvalidArguments, match="cannot be negative"):
            await tick.submit_in(-1, 1)
        async with mesh.worker():
            await tick.submit(2)
            await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)
            assert plain.zcard(PREFIX + "delayed") == 1
            clock.advance(86_401)
            assert await handle.result(timeout=5) == 1


async def test_delayed_work_holds_no_lease_and_can_be_cancelled(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task
    async def later() -> None: ...

    async with mesh.worker():
        handle = await later.submit_in(60)
        assert plain.xpending(PREFIX + "tasks:normal", "workers")["pending"] == 0
        assert await handle.cancel() is Cancelled.CANCELLED
        with pytest.raises(TaskCancelled):
            await handle.result(timeout=1)
    assert not plain.exists(PREFIX + "delayed")


async def test_many_delayed_messages_do_not_collapse_nor_get_lost(mesh: Mesh) -> None:
    @mesh.task
    async def same(n: int) -> int:
        return n

    async with mesh.worker():
        handles = [await same.submit_in(0.05, 7) for _ in range(50)]
        assert [await handle.result(timeout=5) for handle in handles] == [7] * 50


async def test_a_worker_takes_no_more_than_it_has_slots_for(mesh: Mesh, plain: redis.Redis) -> None:
    release = asyncio.Event()
    started: list[int] = []

    @mesh.task
    async def hold(n: int) -> None:
        started.append(n)
        await release.wait()

    await hold.submit_many(range(100))
    async with mesh.worker(WorkerSettings(concurrency=5)):
        await wait_until(lambda: len(started) == 5)
        pending = plain.xpending(PREFIX + "tasks:normal", "workers")["pending"]
        assert pending <= 10
        release.set()
        await wait_until(lambda: len(started) == 100)


async def test_what_waits_behind_slow_tasks_goes_to_a_worker_that_is_free(
    mesh: Mesh, make_mesh: MakeMesh
) -> None:
    release = asyncio.Event()

    async def work(slow: bool) -> None:
        if slow:
            await release.wait()

    other = make_mesh()
    task = mesh.task(work)
    other.task(work)
    settings = WorkerSettings(concurrency=2, hand_back_after=0.1, drain_timeout=5)
    async with mesh.worker(settings):
        for handle in await task.submit_many([False] * 2000):  # fast ones: it fetches ahead
            await handle.result(timeout=10)
        await task.submit_many([True, True])
        quick = await task.submit_many([False] * 20)
        async with other, other.worker(settings):
            for handle in quick:
                await handle.result(timeout=5)
        release.set()


async def test_what_was_handed_back_is_not_fetched_again_while_the_slots_stay_taken(
    mesh: Mesh, plain: redis.Redis
) -> None:
    release = asyncio.Event()

    @mesh.task
    async def work(slow: bool) -> None:
        if slow:
            await release.wait()

    async with mesh.worker(WorkerSettings(concurrency=2, hand_back_after=0.05)):
        for handle in await work.submit_many([False] * 2000):
            await handle.result(timeout=10)
        await work.submit_many([True, True, *[False] * 50])
        await wait_until(lambda: _pending_of_live_workers(plain) == 2)
        for _ in range(20):
            await asyncio.sleep(0.05)
            assert _pending_of_live_workers(plain) == 2
        release.set()


def _pending_of_live_workers(plain: redis.Redis) -> int:
    consumers = plain.xpending(PREFIX + "tasks:normal", "workers")["consumers"]
    return sum(consumer["pending"] for consumer in consumers if consumer["name"] != b"returned")
