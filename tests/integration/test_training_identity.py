"""What a run is held against when somebody goes on with it: the machine, and the data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from taskmesh import Mesh, TrainingError
from taskmesh.training import Finished
from tests.integration.training_support import ONE, make_trainer

MakeMesh = Callable[..., Mesh]


async def train(mesh: Mesh, steps: int, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, **changes)
    async with mesh.worker(ONE):
        return await trainer.run(steps=steps)


async def test_a_run_does_not_go_on_with_other_bits_unless_it_may(make_mesh: MakeMesh) -> None:
    await train(make_mesh(), 2)
    with pytest.raises(
        TrainingError, match=r"was computed with torch .* threads 1; this master has .* threads 2"
    ):
        await train(make_mesh(), 4, threads=2)
    # Who computes nothing may be any machine.
    elsewhere = make_trainer(mesh := make_mesh(), threads=2)
    async with mesh:
        first, last = await elsewhere.versions()
        assert await elsewhere.rollback(to=first.version) == 3
        assert (await elsewhere.store.find()).fingerprint == last.fingerprint
        assert last.fingerprint.endswith("threads 1")
    assert (await train(make_mesh(), 4, threads=2, deterministic=False)).step == 4
    assert (await train(make_mesh(), 6, threads=2)).step == 6, "the others may have computed anywhere"
    with pytest.raises(TrainingError, match="was computed with"):
        await train(make_mesh(), 8)
