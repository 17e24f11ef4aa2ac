"""Training over a real server: shards that cannot be used, losses that jump, handlers that raise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from taskmesh import Mesh, TrainingError
from taskmesh.events import RolledBack, ShardRefused
from taskmesh.tasks import Call, Next
from taskmesh.training import Finished, OnDivergence
from taskmesh.training.orders import ShardResult
from tests.integration.training_support import (
    ONE,
    Digits,
    Recorder,
    loss,
    make_trainer,
    workers,
)

MakeMesh = Callable[..., Mesh]
STEPS = 25


async def train(mesh: Mesh, steps: int = STEPS, count: int = 2, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, **changes)
    async with workers(mesh, count):
        return await trainer.run(steps=steps)


@pytest.fixture
async def expected(make_mesh: MakeMesh) -> str:
    """The digest that an undisturbed run of ``STEPS`` steps comes to."""
    return (await train(make_mesh("expected"))).digest


@pytest.mark.parametrize("point", ["loss", "gradient", "wire"])
async def test_a_shard_that_is_not_finite_is_computed_again(
    make_mesh: MakeMesh, expected: str, point: str
) -> None:
    calls = itertools.count()
    recorder = Recorder()

    def poisoned(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        losses = loss(model, batch)
        if point == "wire" or next(calls) != 30:
            return losses
        if point == "loss":
            return losses * math.nan
        return losses + (model.get_parameter("0.bias") - model.get_parameter("0.bias").detach()).sqrt().sum()

    async def poison(call: Call, call_next: Next) -> Any:
        result = await call_next(call)
        if point == "wire" and isinstance(result, ShardResult) and next(calls) == 30:
            payload = result.inline[:12] + b"\xff" * 4 + result.inline[16:]
            return ShardResult("computed", result.worker, "", 1.0, result.count, result.sizes, payload)
        return result

    mesh = make_mesh(observers=[recorder], middleware=[poison])
    finished = await train(mesh, loss=poisoned)
    refusals = recorder.of(ShardRefused)
    assert len(refusals) == 1
    assert any(word in refusals[0].reason for word in ("finite", "nan", "scale"))
    assert refusals[0].worker
    assert finished.digest == expected
    assert not recorder.of(RolledBack)


async def test_a_worker_that_is_always_wrong_is_avoided(make_mesh: MakeMesh, expected: str) -> None:
    recorder = Recorder()
    bad: list[str] = []

    async def poison(call: Call, call_next: Next) -> Any:
        result = await call_next(call)
        if isinstance(result, ShardResult) and result.status == "computed" and call.context.worker == bad[0]:
            return ShardResult("refused", result.worker, "the loss is nan")
        return result

    mesh = make_mesh(observers=[recorder], middleware=[poison])
    trainer = make_trainer(mesh)
    async with workers(mesh, 1), mesh.worker(ONE) as worker:
        bad.append(worker.worker.decode())
        finished = await trainer.run(steps=STEPS)
    refusals = recorder.of(ShardRefused)
    assert {refusal.worker for refusal in refusals} == set(bad)
    assert 3 <= len(refusals) <= 16, "no shard is given to it after the first few"
    assert finished.digest == expected


async def test_samples_that_are_not_finite_are_left_out(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    bad = 77

    class Poisoned(Digits):
        def fetch(self, indices: Any) -> tuple[Tensor, Tensor]:
            inputs, targets = super().fetch(indices)
            if bad in indices:
                inputs = inputs * math.nan
            return inputs, targets

    trainer = make_trainer(mesh, data=Poisoned(), rollback=OnDivergence(recomputes=1))
    async with workers(mesh, 2):
        finished = await trainer.run(steps=STEPS)
        ledger = await trainer.ledger()
    rollbacks = recorder.of(RolledBack)
    assert len(rollbacks) == len(finished.skipped) == 2, "two data epochs and a bit"
    assert "refused 2 times" in rollbacks[0].reason
    assert rollbacks[0].restored == 0
    for batch in finished.skipped:
        assert bad in await trainer.indices(batch)
    assert finished.step == STEPS
    assert math.isfinite(finished.loss)
    taken = [entry.batch for entry in ledger if entry.batch >= 0]
    assert not set(taken) & set(finished.skipped)
    # Once more, with another number of workers: rollbacks do not depend on them.
    assert (await train(make_mesh("again"), count=1, data=Poisoned())).digest == finished.digest


async def test_a_loss_that_jumps_is_rolled_back(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    poisoned = set(await make_trainer(make_mesh("plan")).indices(18))

    class Wild(Digits):
        def fetch(self, indices: Any) -> tuple[Tensor, Tensor]:
            inputs, targets = super().fetch(indices)
            return inputs * (1e4 if poisoned >= set(indices) else 1.0), targets

    trainer = make_trainer(mesh, data=Wild(), batch_size=128, rollback=OnDivergence(window=5))
    async with workers(mesh, 2):
        # The samples of batch 18 come in other batches of the first data epoch too, but never all in one shard.
        finished = await trainer.run(steps=STEPS)
        versions = await trainer.versions()
    (rollback,) = recorder.of(RolledBack)
    assert "the loss jumped" in rollback.reason
    assert (rollback.version, rollback.restored) == (19, 10)
    assert finished.skipped == (18,)
    assert finished.version == STEPS + 1 + 8, "one rollback, and steps 11 to 18 twice"
    assert versions[-1].skipped == (18,)


async def test_a_run_that_diverges_again_and_again_ends_with_the_reason(mesh: Mesh) -> None:
    def hopeless(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) * math.nan

    trainer = make_trainer(mesh, loss=hopeless, rollback=OnDivergence(recomputes=0, rollbacks=2))
    async with workers(mesh, 1):
        with pytest.raises(
            TrainingError, match=r"diverged at step 1 again after 2 returns to step 0.*loss is nan"
        ):
            await trainer.run(steps=3)


async def test_a_handler_that_raises_surfaces_with_its_traceback(mesh: Mesh) -> None:
    def broken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0][:, :63])  # type: ignore[no-any-return]

    trainer = make_trainer(mesh, loss=broken)
    async with workers(mesh, 1):
        with pytest.raises(TrainingError, match=r"failed 3 times(.|\n)*in broken(.|\n)*mat1 and mat2"):
            await trainer.run(steps=1)


async def test_a_mean_is_refused_as_a_loss(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, loss=lambda model, batch: loss(model, batch).mean())
    async with workers(mesh, 1):
        with pytest.raises(TrainingError, match="reduction='none'"):
            await trainer.run(steps=1)
