"""A run's versions formed again from its ledger, without somebody, and searched for where they turned bad."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import redis
import torch
from torch import Tensor, nn

from taskmesh import CheckpointError, ConfigurationError, Mesh, TrainingError
from taskmesh.events import Committed
from taskmesh.keys import RunKeys
from taskmesh.tensors import FlatModel
from taskmesh.testing import wait_until
from taskmesh.training import (
    DGC,
    Compression,
    Every,
    Half,
    LedgerEntry,
    LocalSteps,
    LowRank,
    NoCompression,
    OnDivergence,
    TopK,
    Trainer,
    TrimmedMean,
)
from tests.conftest import MakeMesh
from tests.integration.training_support import (
    IMAGES,
    LABELS,
    ONE,
    Digits,
    build_with_norm,
    loss,
    make_trainer,
)

KEYS = RunKeys("test", "digits")
ALL = Every(steps=3, keep=100)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def slow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Slow enough for every worker to get some of the shards."""
    time.sleep(0.01)
    return loss(model, batch)


class Poisoned(Digits):
    """Sample 77 is not finite: the batches with it are left out, after a rollback each."""

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(indices)
        return (inputs * math.nan if 77 in indices else inputs), targets


async def train(mesh: Mesh, steps: int, workers: int = 2, **changes: Any) -> Trainer:
    trainer = make_trainer(mesh, **{"checkpoint": ALL, **changes})
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(mesh.worker(ONE))
        await trainer.run(steps=steps)
    return trainer


async def assert_it_replays(trainer: Trainer) -> list[int]:
    """Every version on the way comes out as it was; returns their numbers."""
    found = await trainer.replay()
    formed = {entry.version for entry in await trainer.ledger() if entry.batch >= 0}
    kept = {manifest.version: manifest for manifest in await trainer.versions()}
    for version in found:
        is_rollback = version.version not in formed
        assert version.matches is (None if is_rollback and version.version not in kept else True), version
        if version.version in kept:
            assert version.digest == kept[version.version].parts["parameters"].root.hex()
            assert version.step == kept[version.version].step
    assert any(version.version in kept for version in found)
    return [version.version for version in found]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compression": NoCompression(), "model": build_with_norm},
        {"compression": Half("bf16")},
        {"compression": TopK(0.05)},
        {"compression": DGC(0.05, momentum=0.0)},
        {"compression": LowRank(2)},
        {"aggregation": TrimmedMean()},
        {"mode": LocalSteps(steps=3), "shards": 4, "batch_size": 64},
    ],
    ids=["int8", "plain, with norm", "bf16", "topk", "dgc", "lowrank", "trimmed", "local"],
)
async def test_a_replay_comes_to_the_same_bits(mesh: Mesh, changes: dict[str, Any]) -> None:
    """With a data epoch's short batch, a dropout, a schedule, and shards from two workers."""
    trainer = await train(mesh, 8, data=Digits(300), **changes)
    assert await assert_it_replays(trainer) == list(range(1, 9))
    part = await trainer.replay(3, 7)
    assert [version.version for version in part] == [4, 5, 6, 7]


@pytest.mark.parametrize(
    "changes",
    [{}, {"mode": LocalSteps(steps=3), "shards": 4, "batch_size": 64}, {"compression": TopK(0.05)}],
    ids=["int8", "local", "topk"],
)
async def test_rollbacks_and_batches_that_were_left_out(mesh: Mesh, changes: dict[str, Any]) -> None:
    trainer = await train(
        mesh, 8, data=Poisoned(500), rollback=OnDivergence(recomputes=0, rollbacks=9), **changes
    )
    ledger = await trainer.ledger()
    (current, *_) = reversed(await trainer.versions())
    assert current.skipped
    assert [entry for entry in ledger if entry.batch < 0]
    way = await assert_it_replays(trainer)
    assert len(way) < len(ledger) or len(current.skipped) == 1


async def test_what_was_rolled_back_by_hand_can_be_formed_again_too(mesh: Mesh) -> None:
    trainer = await train(mesh, 7)
    version = await trainer.rollback(to=3)
    assert [found.version for found in await trainer.replay()] == [1, 2, 3, version]
    assert [found.version for found in await trainer.replay(to_version=7)] == list(range(1, 8))
    assert all(found.matches is not False for found in await trainer.replay())
    with pytest.raises(CheckpointError, match="version 6 did not lead to version 8"):
        await trainer.replay(6, 8)


async def test_a_master_that_comes_later_goes_on_from_a_checkpoint(make_mesh: MakeMesh) -> None:
    """The first one is lost four steps after its last checkpoint; those steps led nowhere."""
    mesh = make_mesh()
    trainer = make_trainer(mesh, checkpoint=Every(steps=5, keep=9))

    def stop(committed: Committed) -> None:
        if committed.step == 9:
            raise OSError("lost")

    async with mesh, mesh.worker(ONE):
        with pytest.raises(OSError, match="lost"):
            await trainer.run(steps=12, on_commit=stop)
    again = make_mesh()
    async with again:
        trainer = await train(again, 12, checkpoint=Every(steps=5, keep=9))
        way = await assert_it_replays(trainer)
    assert way == [1, 2, 3, 4, 5, *range(10, 17)]


async def test_what_is_missing_or_damaged_is_said(mesh: Mesh, plain: redis.Redis) -> None:
    trainer = await train(mesh, 7)
    with pytest.raises(CheckpointError, match="keeps no version 4 "):
        await trainer.replay(4)
    with pytest.raises(CheckpointError, match="no entry of version 99"):
        await trainer.replay(to_version=99)
    entries: Any = plain.xrange(KEYS.ledger)
    wrong = msgspec.structs.replace((await trainer.ledger())[4], samples=(1, 2))
    for data, match in (
        (msgspec.msgpack.encode(wrong), "entry of version 5 does not fit the run"),
        (b"\x07", "an entry of the ledger is damaged"),
        (None, "the ledger does not reach back to version 3"),
    ):
        plain.delete(KEYS.ledger)
        for place, (name, fields) in enumerate(entries):
            if place != 4:
                plain.xadd(KEYS.ledger, fields, name)
            elif data is not None:
                plain.xadd(KEYS.ledger, {b"commit": data}, name)
        with pytest.raises(CheckpointError, match=match):
            await trainer.replay(3)
    chunk = next(key for key in plain.keys("*:chunk:6:*") if plain.strlen(key) > 1000)
    plain.setrange(chunk, 9, b"!")
    with pytest.raises(CheckpointError, match=r"chunk 0 of version 6 is corrupt"):
        await trainer.replay(6)


async def test_other_code_does_not_match(make_mesh: MakeMesh) -> None:
    async with make_mesh() as mesh:
        await train(mesh, 4)
    async with make_mesh() as mesh:
        other = make_trainer(mesh, loss=lambda model, batch: 2 * loss(model, batch))
        assert [version.matches for version in await other.replay()] == [False] * 4


def test_entries_of_an_older_release_are_read() -> None:
    old = msgspec.msgpack.encode(
        {"version": 2, "parent": 1, "step": 2, "batch": 1, "samples": [2], "shares": [[0, "w", "t", 2]]}
    )
    entry = msgspec.msgpack.decode(old, type=LedgerEntry)
    assert (entry.anew, entry.digest, entry.without) == ((), b"", "")


async def form_by_hand(trainer: Trainer, without: str) -> Tensor:
    """Steps of SGD from version 0 on the samples of all other workers, written down plainly."""
    flat = FlatModel(await trainer.load(0))
    optimizer = sgd(flat.model.parameters())
    for entry in await trainer.ledger():
        indices = list(await trainer.indices(entry.batch))
        chosen: list[int] = []
        for share, length in zip(entry.shares, entry.samples, strict=True):
            mine, indices = indices[:length], indices[length:]
            chosen += [] if share.worker == without else mine
        if chosen:
            optimizer.zero_grad()
            loss(flat.model, (IMAGES[chosen], LABELS[chosen])).mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return flat.values


async def test_a_version_is_formed_again_without_one_worker(mesh: Mesh, plain: redis.Redis) -> None:
    settings: dict[str, Any] = {
        "model": plain_model,
        "optimizer": sgd,
        "schedule": None,
        "compression": NoCompression(),
    }
    trainer = await train(mesh, 7, loss=slow, **settings)
    ledger = await trainer.ledger()
    workers = sorted({share.worker for entry in ledger for share in entry.shares})
    assert len(workers) == 2
    before = (await trainer.versions())[-1]
    for worker in workers:
        formed = await trainer.form(without=worker)
        assert formed.digest != before.parts["parameters"].root.hex()
        assert formed.left_out == sum(share.worker == worker for entry in ledger for share in entry.shares)
        assert (formed.step, formed.since, formed.version) == (7, 0, None)
        wanted = await form_by_hand(trainer, worker)
        np.testing.assert_allclose(FlatModel(formed.model).values, wanted, rtol=1e-4, atol=1e-6)
    assert (await trainer.versions())[-1] == before, "nothing was committed"
    with pytest.raises(ConfigurationError, match="worker 'nobody' contributed nothing since version 0"):
        await trainer.form(without="nobody")

    formed = await trainer.form(7, without=workers[0], commit=True)
    kept = (await trainer.versions())[-1]
    assert formed.version == kept.version == 8
    assert kept.parts["parameters"].root.hex() == formed.digest
    entry = (await trainer.ledger())[-1]
    assert (entry.version, entry.parent, entry.without, entry.since) == (8, 7, workers[0], 0)
    with pytest.raises(CheckpointError, match="formed again without worker"):
        await trainer.replay()
    async with mesh.worker(ONE):
        assert (await trainer.run(steps=9)).version == 10
    assert [version.version for version in await trainer.replay()] == [9, 10]
    assert all(version.matches is not False for version in await trainer.replay())


async def test_a_run_under_way_takes_nothing_in(mesh: Mesh) -> None:
    trainer = await train(mesh, 2)
    worker = (await trainer.ledger())[0].shares[0].worker
    running = asyncio.create_task(trainer.run(steps=3))  # without a worker
    await wait_until(lambda: trainer._master is not None)
    with pytest.raises(TrainingError, match="is under way"):
        await trainer.form(2, without=worker, commit=True)
    running.cancel()
    await asyncio.wait([running])


@pytest.mark.parametrize("compression", [NoCompression(), TopK(0.5)], ids=lambda each: each.name)
async def test_the_version_that_turned_bad_is_found(mesh: Mesh, compression: Compression) -> None:
    """The loss of batch 13 drives one bias up, so from version 14 on it is above 1."""
    planted = set(await make_trainer(mesh, "plan").indices(13))

    class Marked(Digits):
        def fetch(self, indices: Any) -> Any:
            inputs, targets = super().fetch(indices)
            return inputs, targets, planted >= set(indices)

    def spoiled(model: nn.Module, batch: Any) -> Tensor:
        inputs, targets, is_planted = batch
        losses = loss(model, (inputs, targets))
        return losses - 100 * model.get_parameter("0.bias")[0] if is_planted else losses

    trainer = await train(
        mesh,
        20,
        data=Marked(),
        loss=spoiled,
        model=plain_model,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        schedule=None,
        compression=compression,
        rollback=OnDivergence(window=1000),
    )
    seen: list[float] = []

    def is_bad(model: nn.Module) -> bool:
        assert not model.training
        seen.append(float(model.get_parameter("0.bias")[0].detach()))
        return seen[-1] > 1

    found = await trainer.bisect(is_bad)
    assert (found.version, found.step, found.entry.batch) == (14, 14, 13)
    assert found.evaluations == len(seen) <= 2 + math.ceil(math.log2(20))
    if not isinstance(compression, TopK):
        assert (await trainer.bisect(is_bad, good=12, bad=17)).version == 14
    with pytest.raises(ConfigurationError, match="version 0, where the search begins, is bad already"):
        await trainer.bisect(lambda model: True)
    with pytest.raises(ConfigurationError, match="version 12, where the search ends, is not bad"):
        await trainer.bisect(is_bad, bad=12)
