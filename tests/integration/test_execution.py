"""How shards are computed: precision, micro-batches, activation checkpointing, compile, memory that runs out."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from taskmesh import Mesh
from taskmesh.errors import ConfigurationError, TrainingError
from taskmesh.training import Execution, Finished, NoCompression
from tests.conftest import MakeMesh
from tests.integration.training_support import ONE, Digits, build_wide, loss, make_trainer


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


async def train(mesh: Mesh, steps: int = 12, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, **{"model": plain, "compression": NoCompression(), **changes})
    async with mesh, mesh.worker(ONE):
        return await trainer.run(steps=steps)


async def test_micro_batches_bring_the_same_gradient_up_to_rounding(make_mesh: MakeMesh) -> None:
    whole = await train(make_mesh("whole"), optimizer=_sgd)
    parts = await train(make_mesh("parts"), optimizer=_sgd, execution=Execution(micro_batch=5))
    again = await train(make_mesh("again"), optimizer=_sgd, execution=Execution(micro_batch=5))
    assert parts.digest == again.digest != whole.digest
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4)


async def test_micro_batches_are_of_nearly_equal_length(make_mesh: MakeMesh) -> None:
    seen: list[int] = []

    class Watched(Digits):
        identity = "digits"  # the master need not look at samples

        def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
            seen.append(len(indices))
            return super().fetch(indices)

    await train(make_mesh(), 1, data=Watched(), shards=1, batch_size=13, execution=Execution(micro_batch=4))
    assert sorted(seen) == [3, 3, 3, 4]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
async def test_half_precision_learns_in_fp32_steps(make_mesh: MakeMesh, precision: Any) -> None:
    full = await train(make_mesh("full"), 40)
    half = await train(make_mesh("half"), 40, execution=Execution(precision=precision))
    again = await train(make_mesh("again"), 40, execution=Execution(precision=precision))
    assert half.digest == again.digest != full.digest
    assert half.loss == pytest.approx(full.loss, abs=0.1)


async def test_fp16_keeps_gradients_that_would_vanish(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a loss a hundred-millionth as large, half precision alone knows no gradient."""

    def faint(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) * 1e-8

    def fast(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=2e7)

    half = Execution(precision="fp16")
    settings: dict[str, Any] = {"loss": faint, "optimizer": fast, "schedule": None, "execution": half}
    scaled = await train(make_mesh("scaled"), 40, **settings)
    monkeypatch.setattr("taskmesh.training.execution.SCALES", (1.0,))
    bare = await train(make_mesh("bare"), 40, **settings)
    assert scaled.loss < 1.5e-8
    assert bare.loss > 2.0e-8


async def test_fp16_that_overflows_under_its_scale_is_computed_again_under_a_smaller(
    make_mesh: MakeMesh,
) -> None:
    def loud(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) * 30

    finished = await train(make_mesh(), 30, loss=loud, schedule=None, execution=Execution(precision="fp16"))
    assert finished.skipped == ()
    assert finished.loss < 30


async def test_recomputed_activations_change_no_bit(make_mesh: MakeMesh) -> None:
    expected = await train(make_mesh("kept"), model=build_wide)
    found = await train(
        make_mesh("recomputed"), model=build_wide, execution=Execution(recompute=(nn.Linear, nn.Dropout))
    )
    assert found.digest == expected.digest


@pytest.mark.skipif(shutil.which("g++") is None and shutil.which("gcc") is None, reason="no C++ compiler")
async def test_a_compiled_model_learns(make_mesh: MakeMesh) -> None:
    finished = await train(
        make_mesh(), 4, shards=1, batch_size=64, deterministic=False, execution=Execution(compile=True)
    )
    assert finished.step == 4


def starved(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """As if there were memory for so many samples only."""
    if len(batch[0]) > 4:
        raise torch.OutOfMemoryError("tried to allocate 3.00 GiB")
    return loss(model, batch)


async def test_a_shard_that_is_too_large_is_computed_in_smaller_parts(
    make_mesh: MakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    finished = await train(make_mesh(), 6, loss=starved, optimizer=_sgd, deterministic=False)
    asked = await train(make_mesh("asked"), 6, optimizer=_sgd, execution=Execution(micro_batch=4))
    assert finished.digest == asked.digest
    told = [record.getMessage() for record in caplog.records if "out of memory" in record.getMessage()]
    assert [text.split("from now on ")[1].split(" ")[0] for text in told] == ["8", "4"]


async def test_where_the_bits_depend_on_it_running_out_of_memory_ends_the_run_with_advice(
    make_mesh: MakeMesh,
) -> None:
    with pytest.raises(
        TrainingError, match=r"out of memory with 16 samples.*micro_batch=8.*deterministic=False"
    ):
        await train(make_mesh(), 6, loss=starved)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"execution": Execution(compile=True)}, "torch.compile"),
        ({"execution": Execution(device="cuda")}, "device 'cuda'"),
    ],
)
def test_what_may_change_the_bits_is_refused_where_they_are_promised(
    make_mesh: MakeMesh, wrong: dict[str, Any], what: str
) -> None:
    with pytest.raises(ConfigurationError, match=what):
        make_trainer(make_mesh(), **wrong)


@pytest.mark.parametrize("wrong", [{"precision": "fp8"}, {"micro_batch": 0}])
def test_an_execution_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Execution(**wrong)


def test_a_device_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigurationError, match="nowhere"):
        Execution(device="nowhere").resolve_device()
    assert Execution(device="auto").resolve_device().type in ("cpu", "cuda")


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.2)
