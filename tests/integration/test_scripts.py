"""What a script looks at once more before it acts: races too narrow for schedules to meet often."""

from __future__ import annotations

import pytest
import redis

from taskmesh import Mesh
from taskmesh.broker.scripts import SETTLE
from taskmesh.broker.streams import Partition, Settlement
from taskmesh.messages import Priority

LANE = "taskmesh:{test:default:0}:tasks:normal"
WORKERS = "taskmesh:{test:default:0}:workers"


@pytest.fixture
async def partition(mesh: Mesh) -> Partition:
    """A queue with two workers on its list, the first of which holds three messages."""

    @mesh.task
    async def work(n: int) -> None: ...

    found = mesh.client.partition("default")
    for worker in (b"first", b"second"):
        await found.join(worker, ["work"])
    await work.submit_many(range(3))
    await found.caller.server.link(found.keys.tag).call(*found.wait_command(b"first", 3, 100))
    return found


def owners(plain: redis.Redis) -> list[bytes]:
    return [row["consumer"] for row in plain.xpending_range(LANE, "workers", "-", "+", 10)]


async def test_a_claim_from_one_who_was_heard_of_since_takes_nothing(
    partition: Partition, plain: redis.Redis
) -> None:
    last_seen = b"%d" % plain.zscore(WORKERS, "first")
    plain.zincrby(WORKERS, 1, "first")  # its heartbeat, after the look and before the claim
    assert await partition.claim(b"first", last_seen, b"second", 10) == []
    assert owners(plain) == [b"first"] * 3
    assert plain.zscore(WORKERS, "first") is not None


async def test_a_claim_by_one_who_was_struck_off_takes_nothing(
    partition: Partition, plain: redis.Redis
) -> None:
    last_seen = b"%d" % plain.zscore(WORKERS, "first")
    plain.zrem(WORKERS, "second")
    assert await partition.claim(b"first", last_seen, b"second", 10) == []
    assert owners(plain) == [b"first"] * 3


async def test_a_claim_strikes_off_when_nothing_is_left(partition: Partition, plain: redis.Redis) -> None:
    last_seen = b"%d" % plain.zscore(WORKERS, "first")
    assert len(await partition.claim(b"first", last_seen, b"second", 2)) == 2
    assert plain.zscore(WORKERS, "first") == 1  # no lease is left, only what it holds
    assert len(await partition.claim(b"first", b"1", b"second", 2)) == 1
    assert owners(plain) == [b"second"] * 3
    assert plain.zscore(WORKERS, "first") is None
    assert {consumer["name"] for consumer in plain.xinfo_consumers(LANE, "workers")} == {b"second"}


async def test_who_holds_something_does_not_leave(partition: Partition, plain: redis.Redis) -> None:
    assert not await partition.leave(b"first")
    assert plain.zscore(WORKERS, "first") is not None
    assert await partition.leave(b"second")


async def test_handing_back_what_is_anothers_changes_nothing(
    partition: Partition, plain: redis.Redis
) -> None:
    rows = plain.xpending_range(LANE, "workers", "-", "+", 10)
    entries = [(Priority.NORMAL, row["message_id"]) for row in rows]
    assert await partition.hand_back(b"second", entries) == 0
    assert plain.xpending_range(LANE, "workers", "-", "+", 10)[0]["times_delivered"] == 1
    assert owners(plain) == [b"first"] * 3


async def test_a_settle_call_that_failed_is_not_covered_by_a_later_one(
    partition: Partition, plain: redis.Redis
) -> None:
    """Number 1 was lost on its way while number 2, sent with it, arrived; then number 1 is sent again."""
    ids = [row["message_id"] for row in plain.xpending_range(LANE, "workers", "-", "+", 10)]
    calls = [
        partition.settle_command(Priority.NORMAL, b"first", number, slot, [Settlement(ids[slot], "D", slot)])
        for slot, number in enumerate((1, 2))
    ]
    link = partition.caller.server.link(partition.keys.tag)
    await partition.caller.load(partition.keys.tag, [SETTLE])
    assert await link.call(*calls[1]) == []
    assert await link.call(*calls[0]) == []
    assert await link.call(*calls[0]) == [-1]
    assert plain.xlen(LANE) == 1
