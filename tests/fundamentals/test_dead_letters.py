"""What cannot end well is kept, with its reason: to be looked at, put back, or thrown away."""

from __future__ import annotations

import pytest
import redis

from taskmesh import DecodeError, Mesh, ResultTimeout, TaskFailed
from taskmesh.testing import KeyLeaks, wait_until
from tests.conftest import MakeMesh

PREFIX = "taskmesh:{test:default:0}:"


async def test_a_task_that_failed_for_good_is_kept_with_its_reason(mesh: Mesh) -> None:
    @mesh.task
    async def work(n: int) -> None:
        raise ValueError(f"no {n}")

    async with mesh.worker() as worker:
        handle = await work.submit(7)
        await handle.outcome(timeout=5)
        [letter] = await mesh.dead_letters()
        assert letter.reason.startswith("failed")
        assert letter.message is not None
        assert (letter.message.id, letter.message.task, letter.message.args) == (handle.id, "work", (7,))
        assert (letter.queue, letter.deliveries, letter.worker) == ("default", 1, worker.worker.decode())
        assert letter.failure is not None
        assert letter.failure.message == "no 7"
        assert "ValueError" in letter.failure.traceback


async def test_it_can_be_put_back_and_its_new_result_counts(mesh: Mesh, plain: redis.Redis) -> None:
    broken = True

    @mesh.task
    async def work(n: int) -> int:
        if broken:
            raise ValueError
        return n

    async with mesh.worker():
        handle = await work.submit(7)
        with pytest.raises(TaskFailed):
            await handle.result(timeout=5)
        broken = False
        [letter] = await mesh.dead_letters()
        assert await mesh.requeue(letter)
        assert not await mesh.requeue(letter)  # once, however often it is asked
        await wait_until(lambda: plain.exists(PREFIX + f"result:{handle.id}"))
        assert await mesh.dead_letters() == []
    assert not plain.exists(PREFIX + "dead")


async def test_the_record_of_the_failure_is_void_once_it_is_put_back(make_mesh: MakeMesh) -> None:
    mesh, elsewhere = make_mesh(), make_mesh()

    async def work() -> None:
        raise ValueError

    task, other = mesh.task(work), elsewhere.task(work)
    async with mesh, elsewhere:
        handle = await task.submit()
        async with mesh.worker():
            await handle.outcome(timeout=5)
        [letter] = await mesh.dead_letters()
        await mesh.requeue(letter)
        with pytest.raises(ResultTimeout):
            await other.handle(handle.id).outcome(timeout=0.2)


async def test_it_can_be_thrown_away_with_all_that_belongs_to_it(make_mesh: MakeMesh, redis_url: str) -> None:
    mesh = make_mesh(inline_limit_bytes=100)

    @mesh.task(result_ttl=0)
    async def work(data: bytes) -> None:
        raise ValueError

    async with mesh:
        with KeyLeaks(redis_url):
            async with mesh.worker():
                await work.submit(b"x" * 1000)
                await wait_until(mesh.dead_letters)
            [letter] = await mesh.dead_letters()
            assert await mesh.discard(letter)
            assert not await mesh.discard(letter)


async def test_a_task_that_no_worker_knows_is_parked_and_released_to_one_that_does(
    make_mesh: MakeMesh,
) -> None:
    old, new = make_mesh(), make_mesh()

    @old.task
    async def known() -> None: ...

    @new.task
    async def unknown(n: int) -> int:
        return n

    async with old, new, old.worker():
        handle = await unknown.submit(5)
        await wait_until(old.dead_letters)
        [letter] = await old.dead_letters()
        assert letter.reason == "no handler"
        assert letter.message is not None
        assert letter.message.task == "unknown"
        async with new.worker():
            assert await handle.result(timeout=5) == 5
        assert await old.dead_letters() == []


async def test_with_both_workers_there_every_task_finds_its_own(make_mesh: MakeMesh) -> None:
    old, new = make_mesh(), make_mesh()

    async def same(n: int) -> int:
        return n

    first = old.task(name="first")(same)
    second = new.task(name="second")(same)
    async with old, new, old.worker(), new.worker():
        handles = [await task.submit(n) for n in range(20) for task in (first, second)]
        for handle in handles:
            await handle.result(timeout=20)
        assert await old.dead_letters() == []


@pytest.mark.parametrize(
    "garbage", [b"", b"\x00", b"\x01", b"\x011" + b"i" * 20, b"\x09" + b"x" * 50, b"\x01" * 99]
)
async def test_garbage_on_the_stream_is_kept_with_its_bytes(
    mesh: Mesh, plain: redis.Redis, garbage: bytes
) -> None:
    @mesh.task
    async def fine() -> int:
        return 1

    async with mesh.worker():
        plain.xadd(PREFIX + "tasks:normal", {"message": garbage})
        assert await (await fine.submit()).result(timeout=5) == 1
        await wait_until(mesh.dead_letters)
        [letter] = await mesh.dead_letters()
        assert letter.reason.startswith("undecodable")
        assert letter.raw == garbage
        assert letter.message is None
        with pytest.raises(DecodeError):
            await mesh.requeue(letter)
        assert await mesh.discard(letter)
        await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)


async def test_an_entry_without_a_message_does_not_stop_the_worker(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task
    async def fine() -> int:
        return 1

    async with mesh.worker():
        plain.xadd(PREFIX + "tasks:normal", {"something": "else", "and": "more"})
        assert await (await fine.submit()).result(timeout=5) == 1
        await wait_until(mesh.dead_letters)
        await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)
