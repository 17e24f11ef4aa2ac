"""Handwritten digits, trained by however many workers there are.

Alone, with a worker inside::

    python examples/digits.py

With workers of their own, in other terminals (the master waits for them)::

    export TASKMESH_URL=redis://localhost:6379
    taskmesh worker examples.digits:mesh
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from taskmesh import Mesh
from taskmesh.events import Committed
from taskmesh.training import Every, Trainer

mesh = Mesh("digits-example")
_images, _labels = load_digits(return_X_y=True)
_order = torch.randperm(len(_images), generator=torch.Generator().manual_seed(0))
images = torch.tensor(_images, dtype=torch.float32)[_order] / 16
labels = torch.tensor(_labels)[_order]
HELD_OUT = 297


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
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


trainer = Trainer(
    mesh,
    "digits",
    model=build_model,
    loss=loss,
    data=Digits(),
    optimizer=make_optimizer,
    batch_size=256,
    checkpoint=Every(steps=50, keep=3),
)


def report(committed: Committed) -> None:
    if committed.step % 20 == 0:
        saved = 1 - committed.uplink_bytes / committed.dense_bytes
        print(
            f"step {committed.step:4d}  loss {committed.loss:.4f}  {committed.seconds * 1000:5.1f} ms"
            f"  {saved:.1%} fewer bytes"
        )


async def main() -> None:
    async with mesh.worker():
        finished = await trainer.run(steps=200, on_commit=report)
        share = await trainer.evaluate(images[-HELD_OUT:], labels[-HELD_OUT:])
        print(f"version {finished.version}: {share:.1%} of {HELD_OUT} held-out images are read correctly")


if __name__ == "__main__":
    asyncio.run(main())
