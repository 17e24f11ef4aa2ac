"""A queue in several partitions: the same API, every partition served, one place for each message."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
import redis

from taskmesh import (
    Cancelled,
    ConfigurationError,
    DeadLetter,
    Handle,
    QueueFull,
    QueueOptions,
    TaskFailed,
    WorkerSettings,
)
from taskmesh.keys import partition_of
from taskmesh.monitoring.snapshot import snapshot
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh

PARTS = 4
QUEUES = {"default": QueueOptions(partitions=PARTS)}


def key(partition: int, what: str, queue: str = "default") -> str:
    return f"taskmesh:{{test:{queue}:{partition}}}:{what}"


async def test_messages_are_spread_evenly(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    mesh = make_mesh(queues=QUEUES)

    @mesh.task
    async def double(n: int) -> int:
        return 2 * n

    async with mesh:
        singles = [await double.submit(n) for n in range(8)]
        many = await double.submit_many(range(2000))
        lengths = [plain.xlen(key(number, "tasks:normal")) for number in range(PARTS)]
        assert sum(lengths) == 2008
        assert max(lengths) - min(lengths) <= 32
        async with mesh.worker():
            assert [await handle.result(timeout=10) for handle in singles] == [2 * n for n in range(8)]
            assert [await handle.result(timeout=10) for handle in many] == [2 * n for n in range(2000)]
        assert Counter(partition_of(handle.id) for handle in many).keys() == set(range(PARTS))


async def test_an_id_says_where_its_message_is(make_mesh: MakeMesh) -> None:
    mesh, other = make_mesh(queues=QUEUES), make_mesh()  # the other has not heard of partitions yet

    async def double(n: int) -> int:
        return 2 * n

    task, same = mesh.task(double), other.task(double)
    async with mesh, other, mesh.worker():
        for n in range(PARTS):
            handle = await task.submit(n)
            assert await same.handle(handle.id).result(timeout=5) == 2 * n
        with pytest.raises(ConfigurationError, match="no task's id"):
            task.handle("nonsense")


async def test_cancelling_failing_and_putting_back(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(queues=QUEUES)
    fails = True

    @mesh.task
    async def sometimes(n: int) -> int:
        if fails:
            raise ValueError(n)
        return n

    async with mesh:
        delayed: list[Handle[int]] = [await sometimes.submit_in(60, n) for n in range(PARTS)]
        assert [await handle.cancel() for handle in delayed] == [Cancelled.CANCELLED] * PARTS
        handles = await sometimes.submit_many(range(100))
        async with mesh.worker():
            for handle in handles:
                with pytest.raises(TaskFailed):
                    await handle.result(timeout=5)
            letters: list[DeadLetter] = await mesh.dead_letters()
            assert len(letters) == 100
            assert {letter.partition for letter in letters} == set(range(PARTS))
            [status] = (await snapshot(mesh)).queues
            assert (status.name, status.dead, status.waiting) == ("default", 100, 0)
            fails = False
            for letter in letters:
                assert await mesh.requeue(letter)
            for n, handle in enumerate(handles):
                assert await sometimes.handle(handle.id).result(timeout=5) == n
        assert await mesh.dead_letters() == []


async def test_the_bound_is_shared_out(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(queues={"default": QueueOptions(partitions=PARTS, max_length=8, when_full="reject")})

    @mesh.task
    async def nothing() -> None: ...

    async with mesh:
        for _ in range(8):
            await nothing.submit()
        with pytest.raises(QueueFull):
            await nothing.submit()
    with pytest.raises(ConfigurationError, match="for each of 4 partitions"):
        QueueOptions(partitions=4, max_length=3)
    with pytest.raises(ConfigurationError, match="partitions is 0"):
        QueueOptions(partitions=0)


async def test_a_worker_takes_no_more_than_it_has_room_for(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    """Eight fetchers, of two queues of four partitions, do not fill the same slots."""
    mesh = make_mesh(queues={**QUEUES, "other": QueueOptions(partitions=PARTS)}, liveness_ttl=5.0)
    gate = asyncio.Event()
    names = [key(n, "tasks:normal", queue) for queue in ("default", "other") for n in range(PARTS)]

    @mesh.task
    async def one() -> None:
        await gate.wait()

    @mesh.task(queue="other")
    async def two() -> None:
        await gate.wait()

    def held() -> int:
        return sum(plain.xpending(name, "workers")["pending"] for name in names if plain.exists(name))

    async with mesh:
        for _ in range(400):
            await one.submit()
            await two.submit()
        async with mesh.worker(WorkerSettings(concurrency=40, hand_back_after=60)):
            await wait_until(lambda: held() >= 40)
            most = held()
            gate.set()
            await wait_until(lambda: held() == 0)
        assert most == 40
