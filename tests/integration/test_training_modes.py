"""How contributions become steps: local steps, and workers that are not alike."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from taskmesh import Mesh
from taskmesh.errors import ConfigurationError
from taskmesh.events import Submitted
from taskmesh.tensors import FlatModel
from taskmesh.training import Finished, LocalSteps, NoCompression
from tests.conftest import MakeMesh
from tests.integration.training_support import IMAGES, LABELS, ONE, Digits, Recorder, loss, make_trainer


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5 ** (step / 50))


async def train(mesh: Mesh, steps: int, workers: int, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, **changes)
    async with mesh, contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(mesh.worker(ONE))
        return await trainer.run(steps=steps)


LOCAL: dict[str, Any] = {"mode": LocalSteps(steps=12), "shards": 4, "batch_size": 64, "schedule": halving}


async def test_local_steps_learn_and_come_out_the_same_with_any_number_of_workers(
    make_mesh: MakeMesh,
) -> None:
    one = await train(make_mesh("one"), 8, 1, **LOCAL)
    three = await train(make_mesh("three"), 8, 3, **LOCAL)
    assert one.digest == three.digest
    assert one.loss < 1.0 < math.log(10)


async def test_a_round_is_what_it_says(make_mesh: MakeMesh) -> None:
    """Two rounds of three steps in two shards, against the same written down plainly."""
    mode = LocalSteps(steps=3, lr=0.5, momentum=0.8)
    mesh = make_mesh()
    changes = {"model": plain, "optimizer": sgd, "schedule": halving, "compression": NoCompression()}
    trainer = make_trainer(mesh, mode=mode, shards=2, batch_size=10, seed=3, **changes)
    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=2)
        found = FlatModel(await trainer.load()).values.clone()
        first = FlatModel(await trainer.load(0))
        orders = [list(await trainer.indices(batch)) for batch in range(6)]
        ledger = await trainer.ledger()
    assert [entry.batch for entry in ledger] == [0, 3]

    outer = torch.optim.SGD(first.model.parameters(), lr=0.5, momentum=0.8, nesterov=True)
    for round_ in range(2):
        changes_of: list[torch.Tensor] = []
        begun = first.values.clone()
        for shard in range(2):
            inner = FlatModel(plain())
            inner.load(bytes(first.view()))
            optimizer = sgd(inner.model.parameters())
            schedule = halving(optimizer)
            optimizer.step()  # there is no gradient yet: only so that the schedule does not complain
            for _ in range(round_ * 3):
                schedule.step()
            for batch in orders[round_ * 3 : round_ * 3 + 3]:
                chosen = batch[shard * 5 : shard * 5 + 5]
                optimizer.zero_grad()
                loss(inner.model, (IMAGES[chosen], LABELS[chosen])).mean().backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
            changes_of.append(begun - inner.values)
        first.use_gradient((changes_of[0] + changes_of[1]) / 2)
        outer.step()
    np.testing.assert_allclose(found.numpy(), first.values.numpy(), rtol=2e-5, atol=2e-7)


async def test_each_sample_once_in_a_data_epoch_of_short_batches(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    trainer = make_trainer(mesh, data=Digits(103), batch_size=20, shards=8, mode=LocalSteps(steps=3))
    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=2)
        batches = [await trainer.indices(batch) for batch in range(6)]
        ledger = await trainer.ledger()
    assert Counter(itertools.chain.from_iterable(batches)) == Counter(range(103))
    assert sum(sum(entry.samples) for entry in ledger) == 103


async def test_a_run_of_local_steps_goes_on_as_one_that_was_not_interrupted(make_mesh: MakeMesh) -> None:
    whole = await train(make_mesh("whole"), 6, 1, **LOCAL)
    mesh = make_mesh("parts")
    await train(mesh, 3, 2, **LOCAL)
    again = make_mesh("parts")
    assert (await train(again, 6, 1, **LOCAL)).digest == whole.digest


async def test_another_mode_is_another_run(make_mesh: MakeMesh) -> None:
    await train(make_mesh("parts"), 2, 1, **LOCAL)
    with pytest.raises(Exception, match=r"12 local steps, not one step"):
        await train(make_mesh("parts"), 4, 1, **{key: LOCAL[key] for key in LOCAL if key != "mode"})


async def test_a_worker_whose_bits_would_be_others_gets_no_shards(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = await train(make_mesh("alone"), 5, 1)
    monkeypatch.setattr("taskmesh.training.trainer.fingerprint", lambda *_: "torch 1.0 of another make")
    other = make_mesh("mixed")
    make_trainer(other)
    monkeypatch.undo()
    mesh = make_mesh("mixed")
    trainer = make_trainer(mesh)
    async with other, other.worker(ONE) as unlike, mesh, mesh.worker(ONE) as like:
        finished = await trainer.run(steps=5)
        ledger = await trainer.ledger()
    assert finished.digest == expected.digest
    assert {share.worker for entry in ledger for share in entry.shares} == {like.worker.decode()}
    told = [record.getMessage() for record in caplog.records if "gets no shards" in record.getMessage()]
    assert len(told) <= 1
    assert all(unlike.worker.decode() in text and "torch 1.0 of another make" in text for text in told)


async def test_a_worker_whose_bits_would_be_others_is_not_asked_again_and_again(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskmesh.training.trainer.fingerprint", lambda *_: "torch 1.0 of another make")
    other = make_mesh("mixed")
    make_trainer(other)
    monkeypatch.undo()
    mesh = make_mesh("mixed", observers=[recorder := Recorder()])
    trainer = make_trainer(mesh, shards=1)
    async with other, other.worker(ONE), mesh:
        running = asyncio.create_task(trainer.run(steps=1))
        await asyncio.wait([running], timeout=1.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert sum(event.messages for event in recorder.of(Submitted)) < 20


async def test_unlike_workers_may_help_where_the_bits_do_not_matter(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("taskmesh.training.trainer.fingerprint", lambda *_: "torch 1.0 of another make")
    other = make_mesh("mixed")
    make_trainer(other, deterministic=False)
    monkeypatch.undo()
    mesh = make_mesh("mixed")
    trainer = make_trainer(mesh, deterministic=False)
    async with other, other.worker(ONE), mesh:
        assert (await trainer.run(steps=3)).step == 3


def test_local_steps_without_the_losses_that_a_schedule_goes_by_are_refused(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="without the losses"):
        make_trainer(make_mesh(), mode=LocalSteps(10), schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"lr": 0.0}, {"momentum": 1.0}])
def test_local_steps_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        LocalSteps(**wrong)
