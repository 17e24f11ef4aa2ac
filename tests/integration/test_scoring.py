"""Rows scored by the model of a training run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from taskmesh import Batch, CheckpointError, ConfigurationError, Mesh, TaskFailed
from taskmesh.scoring import from_run, scorer
from tests.integration.training_support import IMAGES, ONE, SAMPLES, build, make_trainer

MakeMesh = Callable[..., Mesh]


async def test_each_row_has_its_own_score_from_the_runs_model(mesh: Mesh) -> None:
    trainer = make_trainer(mesh)
    sizes: list[int] = []

    @scorer(mesh, "digit", model=from_run(trainer), batch=Batch(max_rows=32, max_wait=0.02))
    def score(model: nn.Module, rows: Tensor) -> Tensor:
        assert not model.training
        sizes.append(len(rows))
        return model(rows).softmax(dim=-1)  # type: ignore[no-any-return]

    async with mesh.worker():
        await trainer.run(steps=20)
        model = (await trainer.load()).eval()
        rows = IMAGES[SAMPLES : SAMPLES + 100]
        handles = [await score.submit(row.tolist()) for row in rows[:50]]
        handles += await score.submit_many(row.numpy() for row in rows[50:])
        found = torch.tensor(await asyncio.gather(*(handle.result(timeout=10) for handle in handles)))
    assert sum(sizes) == 100
    assert 1 < max(sizes) <= 32
    with torch.inference_mode():
        torch.testing.assert_close(found, score(model, rows))


async def test_one_number_a_row_and_errors_of_their_own(mesh: Mesh) -> None:
    trainer = make_trainer(mesh)

    @scorer(mesh, "sum", model=from_run(trainer))
    def score(model: nn.Module, rows: Tensor) -> Tensor:
        model(rows)
        return rows.sum(dim=1)

    async with mesh.worker():
        await trainer.run(steps=1)
        good = await score.submit_many(np.full(64, value) for value in range(20))
        bad: list[Any] = [["a"] * 64, np.zeros((2, 2)), [1.0] * 63]
        text, table, short = [await score.submit(row) for row in bad]
        more = await score.submit_many(np.full(64, value) for value in range(20))
        assert [await handle.result(timeout=10) for handle in good] == [64.0 * value for value in range(20)]
        assert [await handle.result(timeout=10) for handle in more] == [64.0 * value for value in range(20)]
        for handle, match in (
            (text, "not a row of numbers"),
            (table, "one dimension"),
            (short, "mat1 and mat2"),
        ):
            with pytest.raises(TaskFailed, match=match):
                await handle.result(timeout=10)


async def test_the_model_is_replaced_when_told(mesh: Mesh) -> None:
    trainer = make_trainer(mesh)

    @scorer(mesh, "bias", model=from_run("digits", build=build))
    def score(model: nn.Module, rows: Tensor) -> Tensor:
        return model.get_parameter("3.bias").sum().expand(len(rows))

    async with mesh.worker(ONE):
        with pytest.raises(TaskFailed, match="no version yet"):
            await (await score.submit([0.0])).result(timeout=10)
        await trainer.run(steps=10)
        first = await (await score.submit([0.0])).result(timeout=10)
        await trainer.run(steps=20)
        assert await (await score.submit([0.0])).result(timeout=10) == first
        assert await score.refresh() == 20
        assert await (await score.submit([0.0])).result(timeout=10) != first
        assert await score.refresh(10) == 10
        assert await (await score.submit([0.0])).result(timeout=10) == first
        with pytest.raises(CheckpointError, match="999"):
            await score.refresh(999)
        assert await (await score.submit([0.0])).result(timeout=10) == first


async def test_it_follows_the_run_where_asked_to(mesh: Mesh) -> None:
    trainer = make_trainer(mesh)
    source = from_run(trainer, refresh_every=0.0)
    async with mesh.worker(ONE):
        await trainer.run(steps=1)
        assert (await source.get(mesh)).version == 1
        await trainer.run(steps=3)
        assert (await source.get(mesh)).version == 3


def test_a_name_alone_does_not_make_a_model() -> None:
    with pytest.raises(ConfigurationError, match="build="):
        from_run("digits")
