"""What goes with what, and runs whose shards are not to be trusted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from taskmesh import Mesh
from taskmesh.errors import ConfigurationError
from taskmesh.training import DGC, Execution, Finished, LocalSteps, Mean, Median, TopK, TrimmedMean
from tests.conftest import MakeMesh
from tests.integration.training_support import IMAGES, LABELS, ONE, SAMPLES, Digits, build_wide, make_trainer


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"aggregation": Median(), "compression": TopK(0.1)}, "median and compression"),
        ({"aggregation": TrimmedMean(), "compression": DGC(0.1, momentum=0.0)}, "sparse gradient"),
        ({"aggregation": Median(), "shards": 2}, "at least 3"),
        ({"compression": DGC(0.1)}, "an optimizer with momentum"),
        ({"mode": LocalSteps(10), "compression": DGC(0.1), "optimizer": sgd}, "changes of parameters"),
        ({"mode": LocalSteps(10), "execution": Execution(precision="fp16")}, "no scaler"),
        ({"execution": Execution(compile=True)}, "deterministic=True"),
    ],
)
def test_choices_that_do_not_go_together_are_refused_with_the_reason(
    make_mesh: MakeMesh, choices: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigurationError, match=what):
        make_trainer(make_mesh(), **choices)


@pytest.mark.parametrize(
    "choices",
    [
        {"compression": DGC(0.1), "optimizer": sgd},
        {"aggregation": Median(), "mode": LocalSteps(10)},
        {"mode": LocalSteps(10), "execution": Execution(precision="bf16", micro_batch=8)},
        {"mode": LocalSteps(10), "compression": TopK(0.1)},
    ],
)
def test_choices_that_go_together(make_mesh: MakeMesh, choices: dict[str, Any]) -> None:
    make_trainer(make_mesh(), **choices)


class Mislabelled(Digits):
    """A tenth of the shards of each batch of 128 in 16 has labels and losses a hundred times too loud."""

    def fetch(self, indices: Any) -> tuple[Tensor, Tensor]:
        chosen = list(indices)
        if min(chosen) % 10 == 0:
            return IMAGES[chosen] * 100, (LABELS[chosen] + 5) % 10
        return IMAGES[chosen], LABELS[chosen]


def held_out(model: nn.Module) -> float:
    with torch.no_grad():
        found = model.eval()(IMAGES[SAMPLES:]).argmax(dim=1)
    return float((found == LABELS[SAMPLES:]).float().mean())


async def train(mesh: Mesh, **changes: Any) -> tuple[Finished, float]:
    settings = {"model": build_wide, "shards": 16, "schedule": None, "rollback": None, **changes}
    trainer = make_trainer(mesh, **settings)
    async with mesh, mesh.worker(ONE):
        finished = await trainer.run(steps=60)
        return finished, held_out(await trainer.load())


async def test_a_median_learns_what_a_mean_is_kept_from(make_mesh: MakeMesh) -> None:
    data = Mislabelled()
    _, robust = await train(make_mesh("median"), data=data, aggregation=Median())
    _, trimmed = await train(make_mesh("trimmed"), data=data, aggregation=TrimmedMean(0.25))
    _, mean = await train(make_mesh("mean"), data=data, aggregation=Mean())
    _, clean = await train(make_mesh("clean"), aggregation=Median())
    assert clean > 0.9
    assert robust > 0.85
    assert trimmed > 0.85
    assert mean < robust


async def test_another_aggregation_is_another_run(make_mesh: MakeMesh) -> None:
    await train(make_mesh("same"), aggregation=Median())
    with pytest.raises(Exception, match="aggregation median, not mean"):
        await train(make_mesh("same"), aggregation=Mean())
