"""What others put where taskmesh looks: each is one dead letter, and the worker goes on with its work."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
import redis

from taskmesh import DecodeError, Mesh, PayloadTooLarge, TaskFailed
from taskmesh.codec import (
    BlobClaim,
    decode_message,
    encode_blob_outcome,
    encode_call,
    encode_message,
    pack_value,
)
from taskmesh.messages import Message, Priority, Status
from taskmesh.monitoring.snapshot import snapshot
from taskmesh.settings import MIB
from taskmesh.testing import wait_until
from taskmesh.worker.endings import KEPT_OF_TOO_LARGE
from tests.conftest import MakeMesh
from tests.hostile import Damage
from tests.unit.test_codec import CASES, encode

BAD, GOOD = 1000, 200
ID = "a" * 12 + "00000001"
SAMPLES = [encode(case) for case in CASES.values() if isinstance(case, Message)]


def shop(make_mesh: MakeMesh, **settings: Any) -> Mesh:
    mesh = make_mesh("shop", **settings)

    @mesh.task
    async def add(a: int, b: int) -> int:
        return a + b

    @mesh.task
    async def same(data: bytes) -> bytes:
        return data

    return mesh


def put(plain: redis.Redis, mesh: Mesh, data: bytes) -> None:
    plain.xadd(mesh.client.partition("default").keys.lanes[Priority.NORMAL], {"message": data})


def undecodable(damage: Damage) -> bytes:
    """Damaged bytes that are no message by chance."""
    while True:
        data = damage.next()
        try:
            decode_message(data)
        except DecodeError:
            return data


@pytest.mark.parametrize("keys", [(), ("a key of 16 bytes or more",)], ids=["plain", "signed"])
async def test_a_thousand_of_them_beside_two_hundred_tasks(
    make_mesh: MakeMesh, plain: redis.Redis, caplog: pytest.LogCaptureFixture, keys: tuple[str, ...]
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    damage = Damage(seed, SAMPLES)
    entries = [undecodable(damage) for _ in range(BAD)]
    async with shop(make_mesh, signing_keys=keys) as mesh:
        add = mesh.get_task("add")
        handles = []
        for number, data in enumerate(entries):
            put(plain, mesh, data)
            if number % (BAD // GOOD) == 0:
                handles.append(await add.submit(number, 1))
        async with mesh.worker() as worker:
            name = worker.worker
            results = [await handle.result(timeout=20) for handle in handles]
            assert results == [number + 1 for number in range(0, BAD, BAD // GOOD)]

            async def all_ended() -> bool:
                return len(await mesh.dead_letters(count=2 * BAD)) >= BAD

            await wait_until(all_ended, 20)
            assert await (await add.submit(1, 2)).result(timeout=5) == 3
            assert worker.worker == name
        letters = await mesh.dead_letters(count=2 * BAD)
    assert Counter(letter.raw for letter in letters) == Counter(entries)
    assert {letter.reason.partition(":")[0] for letter in letters} <= {
        "undecodable",
        "not trusted",
        "no handler",
    }
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("taskmesh")]
    assert len(lines) <= BAD, Counter(line[:30] for line in lines).most_common(5)
    assert all("\n" not in line and len(line) < 400 for line in lines)


async def test_a_message_over_the_limit_is_kept_in_part(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    async with shop(make_mesh, max_payload_bytes=MIB) as mesh, mesh.worker():
        data = encode_call(ID, Priority.NORMAL, "same", (b"x" * 2 * MIB,), {}, {})
        put(plain, mesh, data)
        await wait_until(lambda: mesh.dead_letters())
        [letter] = await mesh.dead_letters()
        assert letter.raw == data[:KEPT_OF_TOO_LARGE]
        assert letter.reason == (
            f"undecodable: it has {len(data):,} bytes; the limit is 1,048,576 bytes (MeshSettings.max_payload_bytes); "
            "its first 65,536 bytes are kept"
        )
        with pytest.raises(PayloadTooLarge, match="the limit is 1,048,576"):
            await mesh.submit("same", b"x" * 2 * MIB)


@pytest.mark.parametrize(
    ("extras", "reason"),
    [
        ({"blob_chunks": 4096}, "undecodable: its arguments claim 4,096 MiB; the limit is 67,108,864 bytes"),
        ({"blob_chunks": 2**40}, "undecodable: the message's blob_chunks is damaged"),
        ({"blob_chunks": -1}, "undecodable: the message's blob_chunks is damaged"),
        ({"result_ttl_ms": 2**63}, "undecodable: the message's result_ttl_ms is damaged"),
        ({"expires_at_ms": "soon"}, "undecodable: the message's expires_at_ms is damaged"),
        ({"attempt": 0}, "undecodable: the message's attempt is damaged"),
        ({"blob_digest": 1}, "undecodable: the message's blob_digest is damaged"),
    ],
)
async def test_claims_that_nobody_could_act_on(
    make_mesh: MakeMesh, plain: redis.Redis, extras: dict[str, Any], reason: str
) -> None:
    async with shop(make_mesh) as mesh, mesh.worker():
        put(plain, mesh, encode_call(ID, Priority.NORMAL, "add", (1, 2), {}, extras))
        await wait_until(lambda: mesh.dead_letters())
        [letter] = await mesh.dead_letters()
        assert letter.reason.startswith(reason)
        assert await mesh.discard(letter)
        assert await (await mesh.submit("add", 1, 2)).result(timeout=5) == 3


@pytest.mark.parametrize("name", ["", "add\nsame", "x" * 101, "a}b", "\x00"])
async def test_names_that_no_task_can_have(make_mesh: MakeMesh, plain: redis.Redis, name: str) -> None:
    """Two workers would hand such a message to and fro: the list of who knows what has a task on each line."""
    async with shop(make_mesh) as mesh, mesh.worker(), shop(make_mesh) as other, other.worker():
        put(plain, mesh, encode_call(ID, Priority.NORMAL, name, (1, 2), {}, {}))
        await wait_until(lambda: mesh.dead_letters())
        [letter] = await mesh.dead_letters()
        assert letter.reason == "undecodable: the name of the task is damaged"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "is gone"),
        (b"x" * (MIB + 1), "has more than 1,048,576 bytes"),
        (b"\xc1", "not a value"),
        (pack_value([1, 2, 3]), "the arguments beside the message are damaged"),
        (pack_value([[1, 2], {1: 2}]), "the arguments beside the message are damaged"),
        ("a list", "is no string"),
    ],
    ids=["gone", "too large", "no value", "no arguments", "no names", "of another type"],
)
async def test_pieces_that_are_not_what_the_message_says(
    make_mesh: MakeMesh, plain: redis.Redis, content: bytes | str | None, reason: str
) -> None:
    async with shop(make_mesh) as mesh:
        handle = await mesh.submit("same", bytes(100_000))
        [key] = plain.keys("*blob*args*")
        plain.delete(key)
        if isinstance(content, bytes):
            plain.set(key, content)
        elif content is not None:
            plain.rpush(key, content)
        async with mesh.worker():
            with pytest.raises(TaskFailed, match=reason):
                await handle.result(timeout=5)
            [letter] = await mesh.dead_letters()
            assert letter.reason.startswith("undecodable: ")
            assert reason in letter.reason


async def test_an_outcome_that_claims_too_much(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    async with shop(make_mesh) as mesh:
        handles = [await mesh.submit("add", 1, 2) for _ in range(4)]
        keys = mesh.client.partition("default").keys
        forged = (
            encode_blob_outcome(Status.SUCCEEDED, BlobClaim(65)),
            encode_blob_outcome(Status.SUCCEEDED, BlobClaim(1))[:3] + pack_value(2**40),
            b"\x01Si" + b"\xdd\xff\xff\xff\xff",
            b"garbage",
        )
        said = (
            r"claims 65 MiB; the limit is 67,108,864 bytes \(MeshSettings.max_payload_bytes\)",
            "count of blob chunks is damaged",
            "not a value",
            "wire version 103; this side reads 1",
        )
        for handle, data in zip(handles, forged, strict=True):
            plain.set(keys.result(handle.id), data)
        for handle, text in zip(handles, said, strict=True):
            with pytest.raises(DecodeError, match=text):
                await handle.result(timeout=5)


async def test_garbage_in_the_dead_letters_can_be_listed_and_thrown_away(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    async with shop(make_mesh) as mesh:
        dead = mesh.client.partition("default").keys.dead
        plain.xadd(dead, {"garbage": b"\xff"})
        plain.xadd(
            dead, {"message": encode_message(Message(ID, "add", (1, 2))), "at": "noon", "reason": b"\xff"}
        )
        letters = await mesh.dead_letters()
        assert [letter.raw == b"" for letter in letters] == [True, False]
        with pytest.raises(DecodeError, match="cannot be requeued"):
            await mesh.requeue(letters[0])
        assert all([await mesh.discard(letter) for letter in letters])
        await asyncio.sleep(0)
        assert await mesh.dead_letters() == []


async def test_garbage_in_every_other_key(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    """A worker starts and works, a client gets its results, and what lies there goes its way or stays."""
    garbage = b"\xff\n garbage"
    async with shop(make_mesh) as mesh:
        keys = mesh.client.partition("default").keys
        first = await mesh.submit("add", 1, 1)  # the reply stream is there now
        plain.xadd(keys.replies(mesh.client.producer), {garbage: garbage, b"more": garbage})
        plain.zadd(keys.delayed, {garbage: 1, b"": 2, b"\x019" + garbage: 3})
        plain.zadd(keys.cancelled, {garbage: 1})
        plain.xadd(keys.parked, {garbage: garbage})
        plain.xadd(keys.parked, {"message": garbage, "task": "add"})
        plain.xadd(keys.parked, {"message": b"\x011", "task": "add"})
        plain.hset(keys.known, garbage, garbage)
        plain.zadd(keys.workers, {garbage: 5})
        async with mesh.worker():
            for kind in ("cancel", "requeued", "due", "returned", "given", garbage):
                plain.xadd(keys.control, {kind: garbage, "more": "than one"})
            later = await mesh.get_task("add").submit_in(0.1, 2, 2)
            assert await first.result(timeout=5) == 2
            assert await later.result(timeout=5) == 4
            await wait_until(lambda: not plain.zcard(keys.delayed))

            async def all_there() -> bool:
                return len(await mesh.dead_letters()) == 3 + 1 + 2

            await wait_until(all_there)
            assert (await snapshot(mesh)).queues[0].dead == 4
