"""The demo's Mesh: a classifier of handwritten digits, trained by gradient shards and served row by row.

The master and every worker import this module. Two switches let the demo's narrator do harm: a file that makes one
shard's loss NaN, and a factor on the master's learning rate.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from taskmesh.app.mesh import Mesh
from taskmesh.scoring import from_run, scorer
from taskmesh.tasks import Batch
from taskmesh.training import Every, Int8, Trainer

HELD_OUT = 360
POISON = Path(os.environ.get("TASKMESH_DATA", ".")) / "poison-one-shard"

_images, _labels = load_digits(return_X_y=True)
_order = torch.randperm(len(_images), generator=torch.Generator().manual_seed(7))
images = torch.tensor(_images, dtype=torch.float32)[_order] / 16
labels = torch.tensor(_labels)[_order]


class Digits:
    """The images that are learnt from: 8 x 8 pixels, as rows of 64."""

    def __len__(self) -> int:
        return len(images) - HELD_OUT

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = list(indices)
        return images[chosen], labels[chosen]


class Push:
    """A factor on the learning rate, in the master's hands."""

    factor = 1.0


def build_model() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Dropout(0.2),
        nn.Linear(64, 10),
    )


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    losses = nn.functional.cross_entropy(model(inputs), targets, reduction="none")
    return losses * float("nan") if _is_poisoned() else losses


def _is_poisoned() -> bool:
    """True for exactly one shard after the file was made: whoever removes it."""
    try:
        POISON.unlink()
    except FileNotFoundError:
        return False
    return True


def make_optimizer(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Adam(parameters, lr=4e-3)


def make_schedule(optimizer: Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: Push.factor)


mesh = Mesh("demo")
trainer = Trainer(
    mesh,
    "digits",
    model=build_model,
    loss=loss,
    data=Digits(),
    optimizer=make_optimizer,
    schedule=make_schedule,
    shards=8,
    batch_size=256,
    compression=Int8(),
    checkpoint=Every(steps=25, keep=3),
)


@scorer(mesh, "digit-scores", model=from_run(trainer), batch=Batch(max_rows=256, max_wait=0.002))
def score(model: nn.Module, rows: Tensor) -> Tensor:
    """The probabilities of the ten digits."""
    return torch.softmax(model(rows), dim=1)
