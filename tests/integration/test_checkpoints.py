"""Versions on a real server: complete or not there, whatever dies when; written by one leader at a time."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import redis

from taskmesh import CheckpointError, LeadershipLost, TrainingError
from taskmesh.broker.caller import Caller
from taskmesh.checkpoints.lease import Lease
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.store import Commit, VersionStore
from taskmesh.testing import MovableClock
from tests.integration import checkpoint_writer as writer
from tests.integration.checkpoint_writer import KEYS, content, keep, make_current, parts_of, save

TTL = 5.0


@pytest.fixture
def clock() -> MovableClock:
    return MovableClock()


@pytest.fixture
async def caller(redis_url: str, clock: MovableClock) -> AsyncIterator[Caller]:
    made = await writer.connect(redis_url, clock)
    yield made
    await made.server.close()


@pytest.fixture
def store(caller: Caller) -> VersionStore:
    return VersionStore(caller, caller, KEYS)


@pytest.fixture
async def token(caller: Caller) -> int:
    return await Lease(caller, KEYS, TTL).acquire()


async def test_what_was_written_is_read(store: VersionStore, token: int) -> None:
    manifest = await save(store, token, 1)
    assert await store.current() == manifest
    assert await store.kept() == [manifest]
    assert await store.find() == await store.find(1) == await store.find_kept(1) == manifest
    newest = await store.load_newest()
    assert newest is not None
    assert newest[0] == manifest
    assert newest[1]["parameters"] == parts_of(1)["parameters"]
    assert newest[1]["state"] == b"state 1"
    assert len(manifest.parts["parameters"].digests) == 3
    assert await store.ledger(10) == [b"entry 1"]


async def test_there_may_be_none(store: VersionStore) -> None:
    assert await store.current() is None
    assert await store.load_newest() is None
    for attempt in (store.find(), store.find(3), store.find_kept(3), store.load_parameters()):
        with pytest.raises(CheckpointError, match="version"):
            await attempt


async def test_old_versions_go_and_leave_nothing(store: VersionStore, token: int, plain: redis.Redis) -> None:
    for version in range(1, 6):
        await save(store, token, version)
    kept = await store.kept()
    assert [manifest.version for manifest in kept] == [4, 5]
    wanted = {key for manifest in kept for key in manifest.keys(KEYS)}
    assert set(plain.keys("*")) == wanted | {KEYS.lease, KEYS.current, KEYS.history, KEYS.ledger}


async def test_chunks_that_a_kept_version_shares_stay(store: VersionStore, token: int) -> None:
    """As a rollback does it: the new version has the old one's chunks, and the old one goes."""
    old = await save(store, token, 1)
    again = Manifest(2, 1, 1, 1, token, True, "layout", old.parts, restored_from=1)
    await store.commit(Commit(again, [old]), token)
    assert [manifest.version for manifest in await store.kept()] == [2]
    assert await store.load(again.parts["parameters"]) == parts_of(1)["parameters"]


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
async def test_a_damaged_chunk_is_found_and_the_version_before_loads(
    store: VersionStore, token: int, plain: redis.Redis, damage: str
) -> None:
    await save(store, token, 1)
    manifest = await save(store, token, 2)
    key = manifest.parts["parameters"].keys(KEYS)[2]
    if damage == "changed":
        plain.setrange(key, 12_345, b"!")
    elif damage == "cut":
        plain.set(key, plain.getrange(key, 0, 99))
    else:
        plain.delete(key)
    with pytest.raises(CheckpointError, match="gone" if damage == "gone" else "corrupt"):
        await store.load_parameters(2)
    newest = await store.load_newest()
    assert newest is not None
    assert newest[0].version == 1
    plain.delete(*(await store.find(1)).parts["state"].keys(KEYS))
    with pytest.raises(CheckpointError, match="none of its 2 checkpoints is whole"):
        await store.load_newest()


async def test_a_version_is_current_before_it_is_kept(store: VersionStore, token: int) -> None:
    """A reader finds it all the time, under its number too, wherever it lies."""
    await save(store, token, 1)
    current = await make_current(store, token, 2)
    assert await store.find() == await store.find(2) == current
    assert [manifest.version for manifest in await store.kept()] == [1]
    assert (await store.load_parameters(2))[1] == content(2)
    kept = await keep(store, token, current)
    assert await store.find() == await store.find(2) == kept
    await store.forget(current.parts["parameters"])
    assert (await store.load_parameters())[1] == parts_of(2)["parameters"]


async def test_a_checkpoint_that_comes_late_does_not_become_current(store: VersionStore, token: int) -> None:
    second = await make_current(store, token, 2)
    third = await make_current(store, token, 3)
    kept = await keep(store, token, second)
    assert await store.find() == third
    assert await store.find(2) == kept


async def test_a_reader_falls_back_when_the_current_version_has_gone(store: VersionStore, token: int) -> None:
    await save(store, token, 1)
    current = await make_current(store, token, 2)
    assert (await store.load_parameters())[1] == content(2)
    await store.forget(current.parts["parameters"])
    manifest, pieces = await store.load_parameters()
    assert manifest.version == 1
    assert pieces == parts_of(1)["parameters"]


async def test_versions_that_are_not_kept_have_a_time_to_live(
    store: VersionStore, token: int, plain: redis.Redis
) -> None:
    part = await store.write(1, token, b"x")
    assert all(plain.pttl(key) > 0 for key in part.keys(KEYS))


async def test_a_master_that_was_replaced_can_write_nothing(
    store: VersionStore, caller: Caller, clock: MovableClock, token: int, plain: redis.Redis
) -> None:
    manifest = await save(store, token, 1)
    late = await make_current(store, token, 2)
    reserved = await store.write_kept(2, token, parts_of(2), manifest)
    clock.advance(TTL + 1)
    successor = await Lease(caller, KEYS, TTL).acquire()
    assert successor > token
    with pytest.raises(LeadershipLost):
        await store.keep(replace(late, kept=True, parts=reserved), token)
    with pytest.raises(LeadershipLost):
        await store.write_kept(3, token, parts_of(3))
    with pytest.raises(LeadershipLost):
        await make_current(store, token, 3)
    with pytest.raises(LeadershipLost):
        await store.drop([manifest], token)
    assert await store.current() == late
    assert await store.kept() == [manifest]
    # Its chunks are gone too: the refused master removes them, the successor what the refused one could not.
    await store.sweep(successor)
    assert set(plain.keys("*chunk*")) == set(manifest.keys(KEYS))
    assert await store.load(manifest.parts["parameters"]) == parts_of(1)["parameters"], (
        "it lent chunks to the other"
    )
    assert (await save(store, successor, 3)).token == successor


async def test_a_commit_whose_reply_was_lost_may_be_made_again(store: VersionStore, token: int) -> None:
    current = await make_current(store, token, 1)
    await store.commit(Commit(current, ledger=b"entry 1"), token)
    assert await store.ledger(10) == [b"entry 1"]
    kept = await keep(store, token, current)
    await store.keep(kept, token, [], current)
    assert await store.kept() == [kept]


async def test_a_checkpoint_whose_reply_was_lost_is_not_undone_when_another_leads_by_then(
    store: VersionStore, caller: Caller, clock: MovableClock, token: int
) -> None:
    """The first try was done; the second is refused. The successor goes on from that version: it must stay whole."""
    manifest = await save(store, token, 1)
    clock.advance(TTL + 1)
    await Lease(caller, KEYS, TTL).acquire()
    with pytest.raises(LeadershipLost):
        await store.keep(manifest, token)
    assert await store.load(manifest.parts["parameters"]) == parts_of(1)["parameters"]


async def test_a_master_that_was_replaced_does_not_sweep_what_its_successor_writes(
    store: VersionStore, caller: Caller, clock: MovableClock, token: int
) -> None:
    """Stopped between a commit and its sweep, it goes on while the successor's chunks are not committed yet."""
    await save(store, token, 1)
    clock.advance(TTL + 1)
    successor = await Lease(caller, KEYS, TTL).acquire()
    current = await make_current(store, successor, 2)
    written = await store.write_kept(2, successor, parts_of(2))
    await store.sweep(token)
    await store.keep(replace(current, kept=True, parts=written), successor)
    assert await store.load(written["parameters"]) == parts_of(2)["parameters"]


async def test_others_write_parts_that_last_with_the_checkpoint(
    store: VersionStore, token: int, plain: redis.Redis
) -> None:
    """What a worker writes goes by itself unless it becomes part of a checkpoint, however late it is written."""
    earlier = await save(store, token, 1)
    current = await make_current(store, token, 2)
    value = content(2)
    part = await store.write_part(2, token, 4, memoryview(value), earlier.parts["parameters"])
    assert {key.rpartition(b":")[2] for key in part.keys(KEYS)} == {b"4", b"5", b"6"}
    assert all(plain.pttl(key) > 0 for key in part.keys(KEYS))
    written = await store.write_kept(2, token, parts_of(2), earlier, {"memory.0": part})
    assert written["parameters"].first == 7
    kept = replace(current, kept=True, parts=written)
    await store.keep(kept, token, [earlier], current)
    await store.write_part(2, token, 4, memoryview(value), None)
    assert all(plain.pttl(key) == -1 for key in kept.keys(KEYS)), "a second delivery changes nothing"
    assert await store.load(part) == value
    again = await store.write_part(3, token, 0, memoryview(value), part)
    assert again.own == [], "equal chunks are borrowed"
    assert set(plain.keys("*:chunk:*")) == set(kept.keys(KEYS))
    plain.delete(part.keys(KEYS)[1])
    with pytest.raises(CheckpointError, match="what was written for version 4 is gone"):
        await store.write_kept(4, token, parts_of(4), None, {"memory.0": part})


async def test_equal_chunks_are_written_once(store: VersionStore, token: int, plain: redis.Redis) -> None:
    first = await save(store, token, 1)
    second = await save(store, token, 2, first)
    one, other = first.parts["parameters"], second.parts["parameters"]
    assert (len(one.own), len(other.own)) == (3, 2)
    assert other.keys(KEYS)[1] == one.keys(KEYS)[1]
    assert second.written_bytes == second.size_bytes - 1024 * 1024
    assert len(plain.keys("*chunk*")) == 3 + 1 + 2 + 1
    third = await save(store, token, 3, second)  # the first one goes, and what it has lent stays
    assert third.parts["parameters"].keys(KEYS)[1] == one.keys(KEYS)[1]
    for manifest in (second, third):
        expected = parts_of(manifest.version)["parameters"]
        assert await store.load(manifest.parts["parameters"]) == expected
    assert set(plain.keys("*chunk*")) == {*second.keys(KEYS), *third.keys(KEYS)}


async def test_what_the_server_has_lost_is_not_borrowed(
    store: VersionStore, token: int, plain: redis.Redis
) -> None:
    first = await save(store, token, 1)
    plain.delete(first.parts["parameters"].keys(KEYS)[1])
    second = await save(store, token, 2, first)
    assert not second.parts["parameters"].loans
    assert await store.load(second.parts["parameters"]) == parts_of(2)["parameters"]


async def test_versions_are_dropped_by_hand(store: VersionStore, token: int, plain: redis.Redis) -> None:
    first = await save(store, token, 1)
    second = await save(store, token, 2, first)
    await store.drop([first], token)
    await store.drop([], token)
    assert await store.kept() == [second]
    assert await store.load(second.parts["parameters"]) == parts_of(2)["parameters"]
    assert set(plain.keys("*chunk*")) == set(second.keys(KEYS))
    assert not plain.exists(KEYS.garbage)


async def test_tokens_rise_with_each_leadership(caller: Caller, clock: MovableClock) -> None:
    one, other = Lease(caller, KEYS, TTL), Lease(caller, KEYS, TTL)
    assert await one.acquire() == 1
    assert await one.acquire() == 1, "the same leadership"
    with pytest.raises(TrainingError, match=one.owner):
        await other.acquire(timeout=0)
    clock.advance(TTL - 1)
    await one.renew()
    clock.advance(TTL - 1)
    with pytest.raises(TrainingError):
        await other.acquire(timeout=0)
    await one.release()
    assert await other.acquire(timeout=0) == 2
    with pytest.raises(LeadershipLost):
        await one.renew()
    await one.release()
    with pytest.raises(TrainingError):
        await one.acquire(timeout=0)


async def test_a_lease_that_ran_out_is_renewed_while_nobody_else_has_come(
    caller: Caller, clock: MovableClock
) -> None:
    lease = Lease(caller, KEYS, TTL)
    await lease.acquire()
    clock.advance(10 * TTL)
    await lease.renew()
    assert lease.token == 1
    clock.advance(10 * TTL)
    assert await lease.acquire() == 2, "taking it anew is another leadership"


async def test_a_contender_waits_until_the_lease_is_free(caller: Caller) -> None:
    one, other = Lease(caller, KEYS, TTL), Lease(caller, KEYS, TTL)
    await one.acquire()
    waiting = asyncio.create_task(other.acquire())
    await asyncio.sleep(0)
    assert not waiting.done()
    await one.release()
    assert await asyncio.wait_for(waiting, 2.0) == 2


def write_until_killed(redis_url: str, seconds: float) -> None:
    """Let a writer run for so long after it has taken the lease."""
    command = [sys.executable, "-m", "tests.integration.checkpoint_writer", redis_url]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        process.kill()


async def test_a_master_killed_at_any_point_of_a_save_leaves_a_whole_version(
    store: VersionStore, redis_url: str, plain: redis.Redis
) -> None:
    """50 writers killed at random instants. What loads is complete, and no chunk outlives the next sweep.

    The middle chunk is written by the first save of all and borrowed ever since, through all retention and sweeps.
    """
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    last = 0
    for _ in range(50):
        await asyncio.to_thread(write_until_killed, redis_url, draw.uniform(0, 0.03))
        newest = await store.load_newest()
        if newest is not None:
            manifest, parts = newest
            assert manifest.version >= last
            assert parts == parts_of(manifest.version)
            last = manifest.version
    await store.sweep(2**31)
    wanted = {key for manifest in await store.kept() for key in manifest.keys(KEYS)}
    middle = {manifest.parts["parameters"].keys(KEYS)[1] for manifest in await store.kept()}
    assert len(middle) == 1
    assert last > 2
    assert set(plain.keys("*chunk*")) == wanted
