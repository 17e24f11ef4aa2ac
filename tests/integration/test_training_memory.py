"""Compressions that remember: each shard stays with the worker that holds its memory."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from typing import Any

import pytest
from torch import Tensor, nn

from taskmesh import Mesh
from taskmesh.events import Committed, MemoryLost
from taskmesh.training import DGC, Compression, Finished, LowRank, TopK, Trainer
from tests.conftest import MakeMesh
from tests.integration.training_support import ONE, Recorder, build_wide, loss, make_trainer

RARE = TopK(0.05)


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


async def test_a_holder_that_dies_is_said_aloud_and_its_shards_begin_anew(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder], liveness_ttl=1.0)
    trainer = make_trainer(mesh, compression=RARE, loss=slow)
    async with mesh, mesh.worker(ONE) as lasting, mesh.worker(ONE) as doomed:

        def on_commit(committed: Committed) -> None:
            if committed.step == 8:
                doomed.abandon()

        finished = await trainer.run(steps=16, on_commit=on_commit)
        assert finished.step == 16
        after = [entry for entry in await trainer.ledger() if entry.step > 9]
    before = {
        share.shard
        for entry in await _ledger(mesh, trainer)
        for share in entry.shares
        if share.worker == doomed.worker.decode()
    }
    lost = {shard for event in recorder.of(MemoryLost) for shard in event.shards}
    assert lost
    assert lost <= before
    assert {share.worker for entry in after for share in entry.shares} == {lasting.worker.decode()}


async def _ledger(mesh: Mesh, trainer: Trainer) -> list[Any]:
    async with mesh:
        return await trainer.ledger()


async def test_a_rollback_forgets_what_was_remembered_since(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, compression=RARE)
    async with mesh, mesh.worker(ONE):
        asked: list[asyncio.Task[int]] = []

        def on_commit(committed: Committed) -> None:
            if committed.step == 15 and not asked:
                asked.append(asyncio.create_task(trainer.rollback(to=10)))

        finished = await trainer.run(steps=20, on_commit=on_commit)
    assert finished.step == 20
    assert [event.shards for event in recorder.of(MemoryLost)] == [tuple(range(8))]
