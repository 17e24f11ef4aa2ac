"""Compressions that remember: each shard stays with the worker that holds its memory."""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import redis
from torch import Tensor, nn

from taskmesh import CheckpointError, Mesh, TrainingError
from taskmesh.checkpoints import manifest as manifests
from taskmesh.checkpoints.store import VersionStore
from taskmesh.checkpoints.tables import MEMORY, memories_of
from taskmesh.events import Committed, MemoryLost, MemoryMoved, RolledBack, ShardRefused
from taskmesh.keys import RunKeys
from taskmesh.tensors import FlatModel
from taskmesh.training import DGC, Compression, Every, Finished, LowRank, OnDivergence, TopK, Trainer
from taskmesh.training.buckets import cut
from taskmesh.training.memory import Memories, fresh, pack, unpack
from taskmesh.worker.runtime import Worker
from tests.conftest import MakeMesh
from tests.integration.training_support import (
    ONE,
    Digits,
    Recorder,
    build,
    build_wide,
    loss,
    make_trainer,
    start_program,
)

RARE = TopK(0.05)
STEPS = 24
KEYS = RunKeys("test", "digits")
STATE_BYTES = 4 * (64 * 32 + 32 + 32 * 10 + 10)


def slow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Slow enough for every worker to get some of the shards."""
    time.sleep(0.01)
    return loss(model, batch)


async def train(mesh: Mesh, steps: int, workers: int, **changes: Any) -> tuple[Finished, Trainer]:
    trainer = make_trainer(mesh, **changes)
    async with mesh, contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(mesh.worker(ONE))
        return await trainer.run(steps=steps), trainer


@pytest.mark.parametrize(
    "compression", [RARE, DGC(0.05, momentum=0.0), LowRank(2)], ids=lambda each: each.name
)
async def test_a_shard_stays_with_its_holder_and_the_bits_are_the_same(
    make_mesh: MakeMesh, compression: Compression
) -> None:
    recorder = Recorder()
    alone, _ = await train(make_mesh("alone"), 30, 1, compression=compression)
    mesh = make_mesh("three", observers=[recorder])
    together, trainer = await train(mesh, 30, 3, compression=compression, loss=slow)
    assert together.digest == alone.digest
    assert together.loss < 2.0
    assert not recorder.of(MemoryLost)
    holders: dict[int, set[str]] = defaultdict(set)
    async with mesh:
        for entry in await trainer.ledger():
            for share in entry.shares:
                holders[share.shard].add(share.worker)
    assert len(holders) == 8
    assert all(len(names) == 1 for names in holders.values())
    assert len(set().union(*holders.values())) > 1


async def test_feedback_is_what_makes_it_learn(make_mesh: MakeMesh) -> None:
    settings: dict[str, Any] = {"model": build_wide, "schedule": None}
    fed, _ = await train(make_mesh("fed"), 60, 1, compression=TopK(0.01), **settings)
    starved, _ = await train(make_mesh("starved"), 60, 1, compression=TopK(0.001, feedback=False), **settings)
    assert fed.loss < 0.5 * starved.loss


@pytest.fixture
async def undisturbed(make_mesh: MakeMesh) -> str:
    """The digest of a run of ``STEPS`` steps to which nothing happens."""
    return (await train(make_mesh("undisturbed"), STEPS, 1, compression=RARE))[0].digest


@contextlib.asynccontextmanager
async def apart(make_mesh: MakeMesh, **changes: Any) -> AsyncIterator[Worker]:
    """A worker that shares no memory with others, as in a process of its own."""
    mesh = make_mesh()
    make_trainer(mesh, **{"compression": RARE, "loss": slow, **changes})
    async with mesh.worker(ONE) as worker:
        yield worker


async def test_a_holder_that_dies_returns_the_run_to_a_checkpoint(
    make_mesh: MakeMesh, undisturbed: str, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder], liveness_ttl=1.0)
    trainer = make_trainer(mesh, compression=RARE, rollback=OnDivergence(rollbacks=0))
    async with mesh, apart(make_mesh), apart(make_mesh), apart(make_mesh) as doomed:

        def on_commit(committed: Committed) -> None:
            if committed.step == 18:
                doomed.abandon()

        finished = await trainer.run(steps=STEPS, on_commit=on_commit)
        ledger = await trainer.ledger()
        versions = await trainer.replay()
    (returned,) = recorder.of(RolledBack)
    assert returned.restored == 10
    assert f"worker {doomed.worker.decode()} had it" in returned.reason
    assert returned.reason.endswith("nothing is left out")
    assert "back from step 18 to step 10" in caplog.text
    assert finished.digest == undisturbed
    assert finished.skipped == ()
    assert not recorder.of(MemoryLost)
    assert [entry.step for entry in ledger] == [*range(1, 19), 10, *range(11, STEPS + 1)]
    assert all(version.matches is not False for version in versions)
    assert versions[-1].digest == undisturbed


async def test_a_run_that_never_gets_on_is_ended(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Memories, "get", lambda *_: None)
    recorder = Recorder()
    with pytest.raises(TrainingError, match="lost workers 20 times on its way from the checkpoint of step 0"):
        await train(make_mesh(observers=[recorder]), 5, 1, compression=RARE)
    assert len(recorder.of(RolledBack)) == 20


async def test_a_worker_that_stops_hands_over_what_it_remembers(
    make_mesh: MakeMesh, undisturbed: str
) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, compression=RARE, checkpoint=Every(steps=10, keep=10))
    stopping: list[asyncio.Task[None]] = []
    async with mesh, apart(make_mesh), apart(make_mesh) as leaving:

        def on_commit(committed: Committed) -> None:
            if committed.step == 15:
                stopping.append(asyncio.create_task(leaving.stop()))

        finished = await trainer.run(steps=STEPS, on_commit=on_commit)
        await asyncio.gather(*stopping)
        held = {
            share.shard
            for entry in (await trainer.ledger())[:14]
            for share in entry.shares
            if share.worker == leaving.worker.decode()
        }
        formed = await trainer.form(without=leaving.worker.decode(), since=0)
    assert formed.left_out == 15 * len(held)
    moved = recorder.of(MemoryMoved)
    assert {shard for event in moved for shard in event.shards} == held != set()
    assert sum(event.size_bytes for event in moved) == len(held) * STATE_BYTES
    assert not recorder.of(RolledBack)
    assert finished.digest == undisturbed


@pytest.mark.parametrize("stops", [False, True])
async def test_steps_go_on_while_workers_write(
    make_mesh: MakeMesh, undisturbed: str, monkeypatch: pytest.MonkeyPatch, stops: bool
) -> None:
    """The checkpoint of step 10 has what was remembered then, also where its worker stops before it is written."""
    gate = asyncio.Event()
    write_part = VersionStore.write_part

    async def slowly(store: VersionStore, version: int, *rest: Any) -> Any:
        if version == 10 and not gate.is_set():
            await gate.wait()
        return await write_part(store, version, *rest)

    monkeypatch.setattr(VersionStore, "write_part", slowly)
    mesh = make_mesh()
    trainer = make_trainer(mesh, compression=RARE)
    under_way: list[asyncio.Task[Any]] = []
    async with mesh, apart(make_mesh) as worker, apart(make_mesh):

        def on_commit(committed: Committed) -> None:
            if committed.step == 14 and not gate.is_set():
                if stops:
                    under_way.append(asyncio.create_task(worker.stop()))
                gate.set()
            elif committed.step == 17 and len(under_way) == stops:
                under_way.append(asyncio.create_task(trainer.rollback(to=10)))

        finished = await trainer.run(steps=STEPS, on_commit=on_commit)
        await asyncio.gather(*under_way)
        restored = [entry.parent for entry in await trainer.ledger() if entry.batch < 0]
    assert restored == [10]
    assert finished.digest == undisturbed


async def test_when_all_stop_at_once_no_step_is_lost(make_mesh: MakeMesh, undisturbed: str) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, compression=RARE)
    async with mesh, apart(make_mesh) as worker:
        stopping: list[asyncio.Task[None]] = []

        def on_commit(committed: Committed) -> None:
            if committed.step == 15:
                stopping.append(asyncio.create_task(worker.stop()))
                running.cancel()

        running = asyncio.create_task(trainer.run(steps=STEPS, on_commit=on_commit))
        await asyncio.wait([running])
        await asyncio.gather(*stopping)
        assert (await trainer.versions())[-1].step == 15
        async with apart(make_mesh):
            finished = await trainer.run(steps=STEPS)
    assert not recorder.of(RolledBack)
    assert finished.digest == undisturbed


async def test_a_shard_that_its_holder_cannot_compute_is_computed_elsewhere(
    make_mesh: MakeMesh, undisturbed: str
) -> None:
    """A machine whose sums go wrong now and then."""

    class Flaky(Digits):
        calls = 0

        def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
            self.calls += 1
            inputs, targets = super().fetch(indices)
            return (inputs * math.nan if self.calls == 20 else inputs), targets

    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, compression=RARE)
    async with mesh, apart(make_mesh), apart(make_mesh, data=Flaky()):
        finished = await trainer.run(steps=STEPS)
    assert len(recorder.of(ShardRefused)) == 1
    assert [event.size_bytes for event in recorder.of(MemoryMoved)] == [STATE_BYTES]
    assert finished.digest == undisturbed


async def test_rollback_and_resume_restore_what_was_remembered(
    make_mesh: MakeMesh, undisturbed: str, plain: redis.Redis
) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, compression=RARE)
    async with mesh, mesh.worker(ONE):
        asked: list[asyncio.Task[int]] = []

        def on_commit(committed: Committed) -> None:
            if committed.step == 15 and not asked:
                asked.append(asyncio.create_task(trainer.rollback(to=10)))

        assert (await trainer.run(steps=17, on_commit=on_commit)).step == 17
        for manifest in (await trainer.versions())[1:]:
            sizes = [part.size_bytes for part in memories_of(manifest.parts).values()]
            assert sizes == [STATE_BYTES] * 8
    again = make_mesh(observers=[recorder])
    finished, trainer = await train(again, STEPS, 2, compression=RARE)
    async with again:
        needed = {key for manifest in await trainer.versions() for key in manifest.keys(KEYS)}
    assert set(plain.keys("taskmesh:{test:run:digits:*}:chunk:*")) == needed
    assert all(plain.pttl(key) == -1 for key in needed)
    assert len(recorder.of(RolledBack)) == 1
    assert not recorder.of(MemoryLost)
    assert finished.digest == undisturbed


async def test_killed_processes_do_not_show(make_mesh: MakeMesh, redis_url: str, undisturbed: str) -> None:
    """A holder and the master are killed with SIGKILL; another master goes on, to the same bits."""
    topk = {"TASKMESH_TEST_COMPRESSION": "topk"}
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, compression=RARE)
    dying = start_program(redis_url, "worker", TASKMESH_TEST_FAIL_AT="started:60", **topk)
    staying = start_program(redis_url, "worker", **topk)
    master = start_program(redis_url, "master", str(STEPS), "13", **topk)
    try:
        assert await asyncio.to_thread(master.wait, 60) == -signal.SIGKILL
        async with mesh:
            finished = await trainer.run(steps=STEPS)
        assert await asyncio.to_thread(dying.wait, 60) == -signal.SIGKILL
    finally:
        for process in (dying, staying, master):
            process.kill()
            process.wait()
    assert finished.digest == undisturbed
    assert not recorder.of(MemoryLost)


async def test_a_version_that_was_formed_without_a_worker_has_its_memories(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    async with mesh:
        trainer = make_trainer(mesh, compression=RARE, loss=slow)
        async with mesh.worker(ONE), mesh.worker(ONE):
            await trainer.run(steps=8)
        formed = await trainer.form(without=(await trainer.ledger())[5].shares[0].worker, commit=True)
        newest = (await trainer.versions())[-1]
        assert newest.version == formed.version
        assert memories_of(newest.parts)
        async with mesh.worker(ONE):
            await trainer.run(steps=10)
        assert all(version.matches is not False for version in await trainer.replay())
    assert not recorder.of(MemoryLost)


async def test_checkpoints_of_an_older_release_begin_anew_and_say_so(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """They have no memories. A replay from there is told so too."""
    await train(make_mesh(), 10, 1, compression=RARE)
    for version, data in plain.hgetall(KEYS.history).items():  # type: ignore[union-attr]
        manifest = manifests.decode(data)
        parts = {name: part for name, part in manifest.parts.items() if not name.startswith(MEMORY)}
        plain.hset(KEYS.history, version, manifests.encode(replace(manifest, parts=parts)))
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    async with mesh:
        _, trainer = await train(mesh, 12, 1, compression=RARE)
        assert [event.shards for event in recorder.of(MemoryLost)] == [tuple(range(8))]
        ledger = await trainer.ledger()
        assert [entry.version for entry in ledger if entry.anew] == [1, 11]
        assert [version.version for version in await trainer.replay(10)] == [11, 12]


@pytest.mark.parametrize("compression", [RARE, DGC(0.05, momentum=0.0), LowRank(2)], ids=lambda it: it.name)
def test_what_is_packed_is_what_comes_back(compression: Compression) -> None:
    buckets = cut(FlatModel(build()).layout, whole=compression.takes_whole_parameters)
    like = fresh(compression, buckets)
    draw = np.random.default_rng(1)
    state = tuple(
        {name: draw.standard_normal(values.shape, np.float32) for name, values in memory.items()}
        for memory in like
    )
    found = unpack(pack(state), like)
    for before, after in zip(state, found, strict=True):
        assert list(before) == list(after)
        for name, values in before.items():
            np.testing.assert_array_equal(after[name], values)
    with pytest.raises(CheckpointError, match="this side expects"):
        unpack(pack(state)[4:], like)
