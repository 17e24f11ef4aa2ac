"""A run that is deleted: nothing of it is left, and another one of its name begins anew."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from taskmesh import Mesh, TrainingError
from taskmesh.testing import wait_until
from taskmesh.training import Every
from tests.integration.training_support import ONE, make_trainer

MakeMesh = Callable[..., Mesh]


async def test_a_deleted_run_begins_anew_and_from_its_mirror_where_that_stays(
    make_mesh: MakeMesh, tmp_path: Path
) -> None:
    def files() -> list[Path]:
        return [path for path in tmp_path.rglob("*") if path.is_file()]

    trainer = make_trainer(
        mesh := make_mesh(), checkpoint=Every(steps=2, keep=9, mirror=f"file://{tmp_path}")
    )
    async with mesh.worker(ONE):
        first = await trainer.run(steps=4)
        assert await trainer.delete() == 3
        assert await trainer.status() is None
        assert files()
        assert await trainer.ledger() == []
        assert await trainer.run(steps=4) == first, "the mirror had it"
        assert await trainer.delete(mirror=True) == 1
        assert not files()
        again = await trainer.run(steps=2)
        assert [entry.step for entry in await trainer.ledger()] == [1, 2]
    assert (again.version, again.step) == (2, 2)


async def test_a_run_under_way_is_not_deleted(make_mesh: MakeMesh) -> None:
    leading = make_trainer(first := make_mesh())
    other = make_trainer(second := make_mesh())
    async with first, second:
        running = asyncio.create_task(leading.run(steps=1))
        await wait_until(lambda: leading._master is not None)
        with pytest.raises(TrainingError, match="under way"):
            await leading.delete()
        with pytest.raises(TrainingError, match="is led by"):
            await other.delete()
        async with first.worker(ONE):
            await running
        assert await other.delete() == 2
