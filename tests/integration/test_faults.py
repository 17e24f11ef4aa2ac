"""Worker processes that are killed, stopped and terminated, at given points and at random.

A ledger outside Redis says what was executed; the handles say how it ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from collections import Counter
from typing import Any

import pytest
import redis

from taskmesh import Context, Mesh
from taskmesh.testing import Point, wait_until
from taskmesh.testing.faults import VARIABLE
from tests.conftest import MakeMesh
from tests.integration.fault_fleet import PREFIX, TTL, Fleet

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


# At random


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
