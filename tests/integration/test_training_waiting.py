"""A run says what it waits for, from where it goes on, and whose handler failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from taskmesh import Mesh, TrainingError
from taskmesh.events import Resumed, ShardRefused, WaitingForLease
from taskmesh.testing import wait_until
from taskmesh.training import reader
from tests.integration.training_support import IMAGES, LABELS, ONE, Recorder, make_trainer

MakeMesh = Callable[..., Mesh]


async def test_inference_without_workers_says_so(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(mesh)
    async with mesh:
        async with mesh.worker(ONE):
            await trainer.run(steps=1)
        monkeypatch.setattr(reader, "PATIENCE", 0.05)
        asking = asyncio.create_task(trainer.evaluate(IMAGES[:500], LABELS[:500]))
        await wait_until(
            lambda: "waiting for 2 tasks of inference; no worker serves queue 'digits'" in caplog.text
        )
        async with mesh.worker(ONE):
            assert await asking > 0


async def test_a_standby_says_whom_it_waits_for_and_where_it_goes_on(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    leading = make_trainer(first := make_mesh())
    standing_by = make_trainer(second := make_mesh(observers=[recorder]))
    async with first, second:
        running = asyncio.create_task(leading.run(steps=10))
        await wait_until(lambda: leading._master is not None)
        waiting = asyncio.create_task(standing_by.run(steps=12))
        await wait_until(lambda: bool(recorder.of(WaitingForLease)))
        async with first.worker(ONE):
            await running
            await waiting
    (event,) = recorder.of(WaitingForLease)
    assert event.leader
    (resumed,) = recorder.of(Resumed)
    assert (resumed.run, resumed.version, resumed.step) == ("digits", 10, 10)


async def test_a_shard_that_fails_is_reported_with_its_worker(
    make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Recorder()

    def broken(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        raise KeyError("no such thing")

    trainer = make_trainer(mesh := make_mesh(observers=[recorder]), loss=broken, shards=1)
    async with mesh.worker(ONE) as worker:
        name = worker.worker.decode()
        with pytest.raises(TrainingError, match=rf"failed 3 times, last on {name}: KeyError(.|\n)*in broken"):
            await trainer.run(steps=1)
    refused = recorder.of(ShardRefused)
    assert {event.worker for event in refused} == {name}
    assert refused[0].reason == "KeyError: 'no such thing'"
    assert f"shard 0 of {name} is refused: KeyError" in caplog.text
