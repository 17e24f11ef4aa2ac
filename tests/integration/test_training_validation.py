"""A metric that is measured as a run goes: kept with its versions, and gone back by."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from taskmesh import Mesh, TrainingError
from taskmesh.events import Committed, RolledBack, Validated
from taskmesh.testing import wait_until
from taskmesh.training import Asynchronous, Compression, Every, OnDivergence, TopK, Validate, accuracy
from tests.integration.training_support import (
    IMAGES,
    LABELS,
    ONE,
    SAMPLES,
    Digits,
    Recorder,
    make_trainer,
)

MakeMesh = Callable[..., Mesh]
BAD = range(25, 30)  # batches
RULE = OnDivergence(window=1000, metric_drop=0.2)


def held_out(model: nn.Module) -> float:
    assert not model.training and not torch.is_grad_enabled()
    return accuracy(model(IMAGES[SAMPLES:]), LABELS[SAMPLES:])


def poisoned(indices: set[int]) -> type[Digits]:
    """Data of which these samples are worse than useless where a whole shard is of them."""

    class Poisoned(Digits):
        def fetch(self, chosen: Any) -> tuple[Tensor, Tensor]:
            inputs, targets = super().fetch(chosen)
            return (30 * inputs, 0 * targets) if indices >= set(chosen) else (inputs, targets)

    return Poisoned


async def test_what_is_measured_goes_into_events_and_manifests(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(
        mesh,
        validate=Validate(held_out, every=5, name="accuracy", best_is="highest"),
        checkpoint=Every(steps=5, keep=1, best="accuracy", best_is="highest"),
    )
    async with mesh.worker(ONE):
        finished = await trainer.run(steps=20)
        validated = recorder.of(Validated)
        assert [event.step for event in validated] == [5, 10, 15, 20]
        committed = {event.step: event.metrics for event in recorder.of(Committed)}
        assert {event.step: event.value for event in validated} == {
            step: metrics["accuracy"] for step, metrics in committed.items() if "accuracy" in metrics
        }
        kept = await trainer.versions()
        values = {manifest.step: manifest.metrics["accuracy"] for manifest in kept}
        assert values[20] == await trainer.evaluate(IMAGES[SAMPLES:], LABELS[SAMPLES:])
        assert max(event.value for event in validated) in values.values()
    plain = make_trainer(other := make_mesh("plain"))
    async with other.worker(ONE):
        assert (await plain.run(steps=20)).digest == finished.digest, "to measure changes nothing"


@pytest.mark.parametrize("compression", [None, TopK(0.5)])
async def test_a_metric_that_drops_is_gone_back_from(
    make_mesh: MakeMesh, compression: Compression | None
) -> None:
    plan = make_trainer(make_mesh("plan"))
    bad = {index for batch in BAD for index in await plan.indices(batch)}
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    # The checkpoints of steps 26 and 28 are newer than the last value that was good, that of step 25.
    choices: dict[str, Any] = {
        "data": poisoned(bad)(),
        "rollback": RULE,
        "checkpoint": Every(steps=2, keep=4),
        "validate": Validate(held_out, every=5, name="accuracy", best_is="highest"),
        "schedule": None,
        "compression": compression,
    }
    trainer = make_trainer(mesh, **choices)
    async with mesh.worker(ONE):
        finished = await trainer.run(steps=33)
        (back,) = recorder.of(RolledBack)
        replayed = await trainer.replay()
    assert "accuracy went from about" in back.reason
    restored = next(event.step for event in recorder.of(Committed) if event.version == back.restored)
    assert restored == 24, "the newest from before the last good value"
    assert finished.skipped == tuple(range(25, 30))
    assert back.reason.endswith("left out: batches 25 to 29")
    assert all(version.matches for version in replayed)
    # Stopped between two values and begun again elsewhere, the run decides the same.
    digests: list[str] = []
    for steps in (27, 33):
        again = make_trainer(other := make_mesh("again"), **choices)
        async with other.worker(ONE):
            digests.append((await again.run(steps=steps)).digest)
    assert digests[-1] == finished.digest


async def test_a_drop_in_an_asynchronous_run_leaves_out_what_its_step_was_made_of(
    make_mesh: MakeMesh,
) -> None:
    values = iter([1.0, 1.0, 1.0, 0.1, *[1.0] * 9])
    recorder = Recorder()
    trainer = make_trainer(
        mesh := make_mesh(observers=[recorder]),
        mode=Asynchronous(staleness=2),
        deterministic=False,
        validate=Validate(lambda model: next(values), every=4, best_is="highest"),
        rollback=RULE,
        checkpoint=Every(steps=4, keep=9),
    )
    async with mesh.worker(ONE):
        finished = await trainer.run(steps=20)
        replayed = await trainer.replay()
    (back,) = recorder.of(RolledBack)
    restored = next(event.step for event in recorder.of(Committed) if event.version == back.restored)
    assert restored == 12
    assert finished.step == 20
    assert finished.skipped
    assert all(version.matches for version in replayed)


async def test_a_run_that_is_stopped_while_it_measures_keeps_that_step(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    measuring, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(model: nn.Module) -> float:
        loop.call_soon_threadsafe(measuring.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return 1.0

    trainer = make_trainer(mesh, validate=Validate(slow, every=3), checkpoint=Every(steps=100))
    async with mesh.worker(ONE):
        running = asyncio.create_task(trainer.run(steps=10))
        await measuring.wait()
        running.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await running
        await wait_until(lambda: bool(recorder.of(Validated)))
        kept = await trainer.versions()
    assert kept[-1].step == 3
    assert kept[-1].metrics["validation"] == 1.0


async def test_a_measure_that_raises_ends_the_run_with_its_name(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, validate=Validate(lambda model: float("much"), every=2))
    async with mesh.worker(ONE):
        with pytest.raises(TrainingError, match="step 2: validation could not be measured: ValueError"):
            await trainer.run(steps=4)
