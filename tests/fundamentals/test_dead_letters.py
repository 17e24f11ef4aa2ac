"""What cannot end well is kept, with its reason: to be looked at, put back, or thrown away."""

from __future__ import annotations

import asyncio

import msgpack
import pytest
import redis

from taskmesh import DecodeError, Mesh, ResultTimeout, TaskFailed
from taskmesh.codec import encode_call
from taskmesh.messages import Priority
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


async def test_all_parked_messages_are_released_however_many_lie_before_them(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh()

    @mesh.task
    async def known(n: int) -> int:
        return n

    async with mesh:
        handles = await known.submit_many(range(1500))
        messages = [fields[b"message"] for _, fields in plain.xrange(PREFIX + "tasks:normal")]
        plain.delete(PREFIX + "tasks:normal")
        pipe = plain.pipeline()
        rows = [("gone", b"\x011" + b"x" * 20 + b"\x92\xa4gone\x90")] * 10_500
        rows += [("known", message) for message in messages]
        for task, message in rows:
            fields = {
                "message": message,
                "reason": "no handler",
                "deliveries": 1,
                "worker": "w",
                "outcome": "",
            }
            pipe.xadd(PREFIX + "parked", {**fields, "at": 1, "task": task})
        pipe.execute()
        async with mesh.worker():
            assert [await handle.result(timeout=10) for handle in handles] == list(range(1500))
        assert plain.xlen(PREFIX + "parked") == 10_500


async def test_a_failure_that_cannot_be_read_here_does_not_hide_the_letters(
    mesh: Mesh, plain: redis.Redis
) -> None:
    @mesh.task
    async def work() -> None:
        raise ValueError(5)

    async with mesh.worker():
        with pytest.raises(TaskFailed):
            await (await work.submit()).result(timeout=5)
        [(entry, fields)] = plain.xrange(PREFIX + "dead")
        plain.xdel(PREFIX + "dead", entry)
        foreign = b"\x01Fi" + msgpack.packb(("E", "text", "", (msgpack.ExtType(99, b"?"),)))
        plain.xadd(PREFIX + "dead", {**fields, b"outcome": foreign})
        [letter] = await mesh.dead_letters()
        assert letter.failure is None
        assert await mesh.requeue(letter)


async def test_one_that_failed_while_it_was_cancelled_can_be_put_back(make_mesh: MakeMesh) -> None:
    here, there = make_mesh(), make_mesh()
    runs = 0

    async def clumsy() -> int:
        nonlocal runs
        runs += 1
        if runs == 1:
            try:
                await asyncio.sleep(30)
            finally:
                raise OSError("while tidying up")
        return runs

    task = here.task(clumsy)
    there.task(clumsy)
    async with here, there, here.worker(), there.worker():
        handle = await task.submit()
        await wait_until(lambda: runs == 1)
        await handle.cancel()
        with pytest.raises(TaskFailed):
            await handle.result(timeout=5)
        [letter] = await here.dead_letters()
        assert await here.requeue(letter)
        assert await task.handle(letter.message.id if letter.message else "").result(timeout=5) == 2


async def test_values_of_a_foreign_type_do_not_condemn_a_task_that_is_others_business(
    mesh: Mesh, plain: redis.Redis
) -> None:
    @mesh.task
    async def fine(value: object) -> int:
        return 1

    foreign = msgpack.ExtType(99, b"?")
    for number, task in enumerate(("elsewhere", "fine")):
        data = encode_call(f"{'f' * 12}{number:08x}", Priority.NORMAL, task, (foreign,), {}, {})
        plain.xadd(PREFIX + "tasks:normal", {"message": data})
    async with mesh.worker():
        await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)
        reasons = {letter.reason.partition(":")[0] for letter in await mesh.dead_letters()}
    assert reasons == {"no handler", "undecodable"}
