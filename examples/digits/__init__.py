"""Handwritten digits, read by a small network that however many workers train.

Alone, with a worker inside::

    python -m examples.digits

With more workers, in other terminals, before or after::

    taskmesh worker examples.digits:mesh

This module is what master and workers share: the workers import it, the master is ``__main__.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from taskmesh import Mesh
from taskmesh.training import Every, Int8, Trainer

HELD_OUT = 297
BATCH = 256
STEPS = 200

mesh = Mesh("digits-example")
_images, _labels = load_digits(return_X_y=True)  # in the package itself: nothing is downloaded
_order = torch.randperm(len(_images), generator=torch.Generator().manual_seed(0))
images = torch.tensor(_images, dtype=torch.float32)[_order] / 16
labels = torch.tensor(_labels)[_order]


class Digits:
    """1,500 images of 8 x 8 pixels, with their labels."""

    def __len__(self) -> int:
        return len(images) - HELD_OUT

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = list(indices)
        return images[chosen], labels[chosen]


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(
        model(inputs), targets, reduction="none"
    )  # one a sample, not their mean


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


trainer = Trainer(
    mesh,
    "digits",
    model=build_model,
    loss=loss,
    data=Digits(),
    optimizer=make_optimizer,
    shards=8,
    batch_size=BATCH,
    compression=Int8(),
    checkpoint=Every(steps=20, keep=4),
)
