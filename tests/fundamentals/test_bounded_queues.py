"""A queue with a bound: submitters wait, or are refused; nothing is dropped in silence."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from taskmesh import Mesh, QueueFull, QueueOptions
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh


def bounded(make_mesh: MakeMesh, **options: object) -> Mesh:
    return make_mesh(queues={"default": QueueOptions(**options)})  # type: ignore[arg-type]


async def test_reject_raises_at_once(make_mesh: MakeMesh) -> None:
    mesh = bounded(make_mesh, max_length=2, when_full="reject")

    @mesh.task
    async def work(n: int) -> int:
        return n

    async with mesh:
        first = await work.submit(1)
        await work.submit_in(60, 2)  # delayed work counts too
        with pytest.raises(QueueFull, match="bound of 2"):
            await work.submit(3)
        async with mesh.worker():
            assert await first.result(timeout=5) == 1
            assert await (await work.submit(4)).result(timeout=5) == 4  # there is room again


async def test_wait_holds_the_submitter_back_until_there_is_room(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = bounded(make_mesh, max_length=10)
    most = 0

    @mesh.task
    async def work(n: int) -> int:
        nonlocal most
        most = max(most, plain.xlen("taskmesh:{test:default:0}:tasks:normal"))
        await asyncio.sleep(0.001)
        return n

    async with mesh, mesh.worker():
        handles = await work.submit_many(range(200))
        assert [await handle.result(timeout=10) for handle in handles] == list(range(200))
    assert 0 < most <= 10


async def test_the_wait_has_an_end(make_mesh: MakeMesh) -> None:
    mesh = bounded(make_mesh, max_length=1, wait_timeout=0.2)

    @mesh.task
    async def work() -> None: ...

    async with mesh:
        await work.submit()
        began = time.monotonic()
        with pytest.raises(QueueFull, match=r"after 0\.2 s"):
            await work.submit()
        assert 0.2 <= time.monotonic() - began < 1.5


async def test_a_submitter_that_gives_up_does_not_disturb_the_others(make_mesh: MakeMesh) -> None:
    mesh = bounded(make_mesh, max_length=1)

    @mesh.task
    async def work(n: int) -> int:
        return n

    async with mesh:
        await work.submit(1)
        gives_up = asyncio.create_task(work.submit(2))
        patient = asyncio.create_task(work.submit(3))
        await asyncio.sleep(0.05)
        gives_up.cancel()
        await asyncio.sleep(0.05)
        async with mesh.worker():
            handle = await asyncio.wait_for(patient, 5)
            assert await handle.result(timeout=5) == 3


async def test_what_was_accepted_of_a_refused_bulk_is_run(make_mesh: MakeMesh) -> None:
    mesh = bounded(make_mesh, max_length=5, when_full="reject")
    ran: list[int] = []

    @mesh.task
    async def work(n: int) -> int:
        ran.append(n)
        return n

    async with mesh:
        with pytest.raises(QueueFull, match="5 left out"):
            await work.submit_many(range(10))
        async with mesh.worker():
            await wait_until(lambda: len(ran) == 5)
    assert ran == [0, 1, 2, 3, 4]
