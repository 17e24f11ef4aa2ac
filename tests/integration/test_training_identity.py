"""What a run is held against when somebody goes on with it: the machine, and the data."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from taskmesh import Mesh, TrainingError
from taskmesh.training import Finished
from taskmesh.training.identity import identify
from tests.integration.training_support import ONE, Digits, make_trainer

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


class Inverted(Digits):
    """As many samples, and others."""

    def fetch(self, indices: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(indices)
        return 1 - inputs, targets


class Named(Inverted):
    def identity(self) -> str:
        return "digits, inverted"


async def test_other_data_of_the_same_length_are_noticed(make_mesh: MakeMesh) -> None:
    await train(make_mesh(), 2)
    with pytest.raises(
        TrainingError, match=r"begun with other data of the same length \(samples [0-9a-f]+, not samples"
    ):
        await train(make_mesh(), 4, data=Inverted())
    looking = make_trainer(mesh := make_mesh(), data=Inverted())
    async with mesh:
        with pytest.raises(TrainingError, match="begun with other data"):
            await looking.replay()
    assert (await train(make_mesh(), 4)).step == 4
    assert (await train(make_mesh(), 6, data=Named())).step == 6, "who says what they are is believed"
    Named.identity = lambda self: "digits, again"  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=r"\(identity digits, inverted, not identity digits, again\)"):
        await train(make_mesh(), 8, data=Named())


def test_what_tells_data_apart() -> None:
    calls = itertools.count()

    class Data:
        def __init__(self, fetch: Callable[[Any], Any], length: int = 100) -> None:
            self.length = length
            self.fetch = fetch

        def __len__(self) -> int:
            return self.length

    def name(fetch: Callable[[Any], Any], length: int = 100) -> str:
        return identify(Data(fetch, length), 0)

    def fail(indices: Any) -> Any:
        raise OSError("the data are elsewhere")

    alike = name(lambda indices: {"x": torch.tensor(indices), "y": [str(each) for each in indices]})
    assert alike.startswith("samples ")
    assert alike == name(lambda indices: {"x": torch.tensor(indices), "y": list(map(str, indices))})
    different = [
        lambda indices: {"x": torch.tensor(indices), "y": []},
        lambda indices: {"x": torch.tensor(indices).float(), "y": list(map(str, indices))},
        lambda indices: {"x": torch.tensor(indices)[:, None], "y": list(map(str, indices))},
        lambda indices: np.array(indices),
        lambda indices: tuple(indices),
        lambda indices: torch.rand(3),
    ]
    assert len({alike, *map(name, different)}) == 7
    assert "" not in set(map(name, different)), "augmentation draws from generators that are seeded"
    unknown = [
        fail,
        lambda indices: next(calls),
        lambda indices: object(),
        lambda indices: np.array([object()]),
    ]
    assert set(map(name, unknown)) == {""}
    assert name(lambda indices: indices, 1) == name(lambda indices: [0], 3)
    assert name(lambda indices: torch.tensor(1.0)) == name(lambda indices: torch.tensor(1.0))
