"""Signed messages and outcomes through the whole engine, and what becomes of forged ones."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
import redis

from taskmesh import Cancelled, Context, DecodeError, Mesh, Retry, TaskFailed, WorkerSettings
from taskmesh.codec import encode_message, encode_success
from taskmesh.messages import Message, Priority
from taskmesh.signing import Signer
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh, settings_for_tests
from tests.fundamentals import process_tasks

OLD, NEW, OTHER = "the old key of 16+ bytes", "the new key of 16+ bytes", "somebody else's key"
ID = "a" * 12 + "00000001"
LARGE = bytes(range(256)) * 1024


def shop(make_mesh: MakeMesh, *keys: str, **settings: Any) -> Mesh:
    mesh = make_mesh("shop", signing_keys=keys, **settings)
    ran: list[Any] = []
    mesh.ran = ran  # type: ignore[attr-defined]

    @mesh.task
    async def add(a: int, b: int) -> int:
        ran.append((a, b))
        return a + b

    @mesh.task
    async def same(data: bytes) -> bytes:
        ran.append(len(data))
        return data

    @mesh.task(retry=Retry(attempts=2, delay=0.01))
    async def moody(ctx: Context, fails: int) -> int:
        ran.append(ctx.attempt)
        if ctx.attempt <= fails:
            raise OSError(f"attempt {ctx.attempt}")
        return ctx.attempt

    return mesh


def stream_of(mesh: Mesh) -> bytes:
    return mesh.client.partition("default").keys.lanes[Priority.NORMAL]


async def test_everything_goes_its_way_signed(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    async with shop(make_mesh, NEW) as mesh:
        handle = await mesh.submit("add", 1, 2)
        entries: Any = plain.xrange(stream_of(mesh))
        assert entries[0][1][b"message"][0] == 2
        delayed = await mesh.get_task("add").submit_in(60, 1, 2)
        assert await delayed.cancel() is Cancelled.CANCELLED
        assert plain.zcard(mesh.client.partition("default").keys.delayed) == 0
        later = await mesh.get_task("add").submit_in(0.1, 3, 4)
        async with mesh.worker():
            assert await handle.result(timeout=5) == 3
            assert await later.result(timeout=5) == 7
            assert await (await mesh.submit("same", LARGE)).result(timeout=5) == LARGE
            assert await (await mesh.submit("moody", 1)).result(timeout=5) == 2
            with pytest.raises(TaskFailed, match="attempt 2"):
                await (await mesh.submit("moody", 2)).result(timeout=5)
            assert (await delayed.outcome(timeout=5)).status == "cancelled"
            handles = await mesh.get_task("add").submit_many(
                [mesh.get_task("add").bind(n, 1) for n in range(50)]
            )
            assert [await handle.result(timeout=5) for handle in handles] == [n + 1 for n in range(50)]
            [letter] = await mesh.dead_letters()
            assert letter.message is not None
            assert letter.failure is not None
            assert await mesh.requeue(letter)
            await wait_until(lambda: mesh.dead_letters())
        assert plain.get(mesh.client.partition("default").keys.result(handle.id))[:1] == b"\x02"  # type: ignore[index]


async def test_handlers_in_processes_are_signed_for_by_their_worker(redis_url: str) -> None:
    process_tasks.mesh.settings = settings_for_tests(redis_url, signing_keys=(NEW,))
    async with process_tasks.mesh as mesh, mesh.worker(WorkerSettings(processes=1, drain_timeout=5)):
        assert await (await process_tasks.count_to.submit(10)).result(timeout=20) > 0
        with pytest.raises(TaskFailed, match="ValueError: no 7"):
            await (await process_tasks.fails.submit(7)).result(timeout=5)


def forgeries() -> dict[str, bytes]:
    message = encode_message(Message(ID, "add", (1, 2)))
    signed = Signer("shop", (NEW,)).sign(message)
    return {
        "not signed": message,
        "another key": Signer("shop", (OTHER,)).sign(message),
        "another Mesh": Signer("shop2", (NEW,)).sign(message),
        "other arguments": signed.replace(b"\x92\x01\x02", b"\x92\x01\x03"),
        "another task": signed.replace(b"\xa3add", b"\xa3sub"),
        "an outcome": Signer("shop", (NEW,)).sign_outcome(ID, message),
        "cut": signed[:-1],
        "no signature at all": signed[:10],
        "an unknown task, not signed": encode_message(Message(ID, "nobody-knows", (1, 2))),
    }


@pytest.mark.parametrize("name", list(forgeries()))
async def test_a_forged_message_never_runs_and_is_kept(
    make_mesh: MakeMesh, plain: redis.Redis, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    data = forgeries()[name]
    async with shop(make_mesh, NEW, OLD) as mesh, mesh.worker():
        plain.xadd(stream_of(mesh), {"message": data})
        await wait_until(lambda: mesh.dead_letters())
        [letter] = await mesh.dead_letters()
        assert letter.raw == data
        assert letter.message is None
        assert letter.reason in (
            "not trusted: the message is not signed, and this Mesh takes only signed ones",
            "not trusted: the message's signature fits none of this Mesh's keys: it was changed, or signed with "
            "another key",
        )
        with pytest.raises(DecodeError, match="cannot be requeued: not trusted"):
            await mesh.requeue(letter)
        assert await (await mesh.submit("add", 5, 6)).result(timeout=5) == 11
        assert mesh.ran == [(5, 6)]  # type: ignore[attr-defined]
        assert await mesh.discard(letter)
    assert len([record for record in caplog.records if "refused" in record.getMessage()]) == 1


async def test_arguments_beside_the_message_are_part_of_what_is_signed(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    async with shop(make_mesh, NEW) as mesh:
        handle = await mesh.submit("same", LARGE)
        [key] = plain.keys("*blob*args*")
        plain.setrange(key, 1000, b"!")
        async with mesh.worker():
            with pytest.raises(TaskFailed, match="not those that were signed"):
                await handle.result(timeout=5)
            [letter] = await mesh.dead_letters()
            assert (
                letter.reason
                == "not trusted: the arguments beside the message are not those that were signed"
            )
            assert mesh.ran == []  # type: ignore[attr-defined]


async def test_a_forged_outcome_is_refused_where_it_is_read(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    async with shop(make_mesh, NEW) as mesh:
        keys = mesh.client.partition("default").keys
        first, second, third = [await mesh.submit("add", n, 1) for n in range(3)]
        plain.set(keys.result(first.id), encode_success(1_000_000))
        with pytest.raises(DecodeError, match="the outcome is not signed"):
            await first.result(timeout=5)
        async with mesh.worker():
            assert await second.result(timeout=5) == 2
        # A genuine outcome, but of another message; read by another client, to which it was not pushed.
        plain.set(keys.result(third.id), plain.get(keys.result(second.id)))  # type: ignore[arg-type]
        async with shop(make_mesh, NEW) as other:
            assert await other.get_task("add").handle(second.id).result(timeout=5) == 2
            with pytest.raises(DecodeError, match="signature fits none"):
                await other.get_task("add").handle(third.id).result(timeout=5)


async def test_the_blob_of_an_outcome_is_part_of_what_is_signed(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    async with shop(make_mesh, NEW) as mesh, mesh.worker():
        handle = await mesh.submit("same", LARGE)
        await wait_until(lambda: bool(plain.get(mesh.client.partition("default").keys.result(handle.id))))
        [key] = plain.keys("*blob*result*")
        plain.setrange(key, 1000, b"!")
        with pytest.raises(DecodeError, match="is not the one that was signed"):
            await handle.result(timeout=5)


async def test_keys_change_while_old_and_new_processes_are_side_by_side(make_mesh: MakeMesh) -> None:
    """Every step of the change-over: a worker of one state runs what submitters of its neighbours send, and back."""
    states: list[tuple[str, ...]] = [
        (),
        ("unsigned", OLD),
        (OLD, "unsigned"),
        (OLD,),
        (OLD, NEW),
        (NEW, OLD),
        (NEW,),
    ]
    for before, after in itertools.pairwise(states):
        for worker_keys, submitter_keys in ((before, after), (after, before)):
            working, mesh = shop(make_mesh, *worker_keys), shop(make_mesh, *submitter_keys)
            async with working, working.worker(), mesh:
                assert await (await mesh.submit("moody", 1)).result(timeout=5) == 2
                assert await (await mesh.submit("same", LARGE)).result(timeout=5) == LARGE
                assert await mesh.dead_letters() == []


async def test_retries_are_signed_with_the_new_key(make_mesh: MakeMesh) -> None:
    async with shop(make_mesh, OLD) as old, shop(make_mesh, NEW, OLD) as new:
        handle = await old.submit("moody", 1)
        async with new.worker():
            with pytest.raises(DecodeError, match="fits none"):  # the outcome's key is the new one
                await handle.result(timeout=5)
        assert new.ran == [1, 2]  # type: ignore[attr-defined]


async def test_a_mesh_without_keys_leaves_what_is_signed_to_those_who_can_tell(make_mesh: MakeMesh) -> None:
    async with shop(make_mesh, NEW) as mesh, shop(make_mesh) as keyless:
        handle = await mesh.submit("add", 1, 2)
        async with keyless.worker():
            await wait_until(lambda: keyless.dead_letters())
            [letter] = await keyless.dead_letters()
            assert letter.reason == "no handler"  # parked
            async with mesh.worker():
                assert await handle.result(timeout=5) == 3
                handles = [await mesh.submit("add", n, 2) for n in range(20)]
                assert [await handle.result(timeout=5) for handle in handles] == [n + 2 for n in range(20)]
            with pytest.raises(DecodeError, match="the outcome is signed, and this Mesh has no keys"):
                await keyless.get_task("add").handle(handle.id).result(timeout=5)
        assert keyless.ran == []  # type: ignore[attr-defined]


async def test_a_dead_letter_of_a_key_that_is_gone_waits_for_it(make_mesh: MakeMesh) -> None:
    async with shop(make_mesh, OLD) as old, shop(make_mesh, NEW) as new:
        await old.submit("add", 1, 2)
        async with new.worker():
            await wait_until(lambda: new.dead_letters())
            [letter] = await new.dead_letters()
            with pytest.raises(DecodeError, match="cannot be requeued"):
                await new.requeue(letter)
            async with shop(make_mesh, NEW, OLD) as both:
                [letter] = await both.dead_letters()
                assert await both.requeue(letter)
                await wait_until(lambda: new.ran == [(1, 2)])  # type: ignore[attr-defined]


async def test_keys_stand_in_no_log_and_no_repr(
    make_mesh: MakeMesh, plain: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("DEBUG"):
        async with shop(make_mesh, NEW, OLD) as mesh, mesh.worker() as worker:
            plain.xadd(stream_of(mesh), {"message": b"\x02 garbage"})
            await wait_until(lambda: mesh.dead_letters())
            shown = f"{mesh!r} {mesh.settings!r} {worker!r} {mesh.client!r} {mesh.client.signer!r}"
            await asyncio.sleep(0)
    for text in (caplog.text, shown):
        assert NEW not in text
        assert OLD not in text
