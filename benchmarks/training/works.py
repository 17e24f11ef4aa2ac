"""What is trained: model, data, loss and optimizer of each run, the same for our side and for DDP."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from benchmarks.training import tiny_gpt
from benchmarks.training.plan import COMPRESSIONS, SLOWNESS, Plan
from taskmesh import Mesh
from taskmesh.training import Dataset, Every, Synchronous, Trainer

Optimizer = torch.optim.Optimizer
Parameters = Iterable[nn.Parameter]
NAP = 0.02
ELSEWHERE_LAYERS = 8


@dataclass(frozen=True)
class Work:
    """``validate`` gives a model's loss on held-out data."""

    model: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    data: Dataset[Any]
    optimizer: Callable[[Parameters], Optimizer]
    schedule: Callable[[Optimizer], LRScheduler] | None = None
    validate: Callable[[nn.Module], float] | None = None


class Rows:
    """Rows of inputs and, where there are any, their targets."""

    def __init__(self, inputs: Tensor, targets: Tensor | None = None) -> None:
        self.inputs = inputs
        self.targets = targets

    def __len__(self) -> int:
        return len(self.inputs)

    def fetch(self, indices: Sequence[int]) -> Any:
        chosen = list(indices)
        if self.targets is None:
            return self.inputs[chosen]
        return self.inputs[chosen], self.targets[chosen]


def _random_rows(count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(0))


def _cross_entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def dense(plan: Plan) -> Work:
    """Four square linear layers without bias, ``size`` parameters; random inputs, mean of squares."""
    side = int((plan.size / 4) ** 0.5)

    def build() -> nn.Module:
        return nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(4)])

    def squares(model: nn.Module, rows: Tensor) -> Tensor:
        found: Tensor = model(rows).square().mean(dim=1)
        return found

    sgd = functools.partial(torch.optim.SGD, lr=1e-4)
    return Work(build, squares, Rows(_random_rows(10 * plan.batch, side)), sgd)


def dense_adam(plan: Plan) -> Work:
    """The same with Adam: three times the state."""
    return replace(dense(plan), optimizer=functools.partial(torch.optim.Adam, lr=1e-4))


def naps(plan: Plan) -> Work:
    """Next to no computation, and a sleep for each shard, as long as this worker is slow."""
    pause = NAP * float(os.environ.get(SLOWNESS, "1"))

    def slow_squares(model: nn.Module, rows: Tensor) -> Tensor:
        time.sleep(pause)
        found: Tensor = model(rows).square().mean(dim=1)
        return found

    sgd = functools.partial(torch.optim.SGD, lr=1e-3)
    return Work(lambda: nn.Linear(8, 8), slow_squares, Rows(_random_rows(10 * plan.batch, 8)), sgd)


class _Pause(torch.autograd.Function):
    """Waits on the way there, and twice as long on the way back, as computing would take."""

    @staticmethod
    def forward(context: Any, values: Tensor, seconds: float) -> Tensor:
        context.seconds = seconds
        time.sleep(seconds)
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * context.seconds)
        return gradients[0], None


class _Computing(nn.Module):
    """A layer's computing, as a wait: a processor of its own, which this machine does not have, would do it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def forward(self, values: Tensor) -> Tensor:
        found: Tensor = _Pause.apply(values, self._seconds)  # type: ignore[no-untyped-call]
        return found


def elsewhere(plan: Plan) -> Work:
    """As ``dense`` with eight layers, ``size`` parameters; what a shard computes beside them is waited for."""
    side = max(1, int((plan.size / ELSEWHERE_LAYERS) ** 0.5))
    pause = NAP * float(os.environ.get(SLOWNESS, "0")) / (3 * ELSEWHERE_LAYERS)

    def build() -> nn.Module:
        layers = [(nn.Linear(side, side, bias=False), _Computing(pause)) for _ in range(ELSEWHERE_LAYERS)]
        return nn.Sequential(*[module for pair in layers for module in pair])

    return replace(dense(plan), model=build, data=Rows(_random_rows(10 * plan.batch, side)))


def augmented(plan: Plan) -> Work:
    """All that depends on chance or on history: dropout, augmentation, Adam, a cosine schedule; a short last batch."""
    inputs = _random_rows(1_000, 32)
    targets = (inputs @ _random_rows(32, 5)).argmax(dim=1)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 5))

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        mirrored = torch.from_numpy(np.random.random(len(inputs)) < 0.1)
        inputs = torch.where(mirrored[:, None], -inputs, inputs) + 0.05 * torch.randn_like(inputs)
        return _cross_entropy(model, (inputs, targets))

    adam = functools.partial(torch.optim.Adam, lr=1e-2)
    return Work(
        build, noisy, Rows(inputs, targets), adam, functools.partial(CosineAnnealingLR, T_max=plan.steps)
    )


def digits(plan: Plan) -> Work:
    """scikit-learn's handwritten digits, 297 held out; the hidden layer has ``size`` units."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    inputs, targets = torch.tensor(pixels, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(64, plan.size), nn.ReLU(), nn.Linear(plan.size, plan.size), nn.ReLU(),
            nn.Linear(plan.size, 10),
        )  # fmt: skip

    def validate(model: nn.Module) -> float:
        model.eval()
        with torch.no_grad():
            return float(_cross_entropy(model, (inputs[1500:], targets[1500:])).mean())

    adam = functools.partial(torch.optim.Adam, lr=5e-3)
    return Work(build, _cross_entropy, Rows(inputs[:1500], targets[:1500]), adam, validate=validate)


def tiny(plan: Plan) -> Work:
    """The byte-level transformer, or one of ``size`` columns and two layers.

    Its first parameters follow from the seed alone, on whatever side it is built.
    """

    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(plan.seed)
            return tiny_gpt.TinyGpt(plan.size, 2) if plan.size else tiny_gpt.TinyGpt()

    adam = functools.partial(torch.optim.Adam, lr=1e-3)
    return Work(build, tiny_gpt.loss, tiny_gpt.StandardLibrary(), adam, validate=tiny_gpt.validate)


WORKS: dict[str, Callable[[Plan], Work]] = {
    "dense": dense,
    "dense_adam": dense_adam,
    "elsewhere": elsewhere,
    "naps": naps,
    "augmented": augmented,
    "digits": digits,
    "tiny_gpt": tiny,
}


def make_work(plan: Plan) -> Work:
    """What the plan says is trained."""
    return WORKS[plan.work](plan)


def make_trainer(mesh: Mesh, plan: Plan, work: Work) -> Trainer:
    """The plan's run over a Mesh."""
    return Trainer(
        mesh,
        "run",
        model=work.model,
        loss=work.loss,
        data=work.data,
        optimizer=work.optimizer,
        schedule=work.schedule,
        shards=plan.shards,
        batch_size=plan.batch,
        compression=COMPRESSIONS[plan.compression](),
        downlink=COMPRESSIONS[plan.downlink]() if plan.downlink else None,
        mode=Synchronous(backups=plan.backups),
        reduce=plan.reduce,
        checkpoint=Every(steps=plan.checkpoint_every),
        seed=plan.seed,
    )
