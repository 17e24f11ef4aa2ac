"""A small transformer that learns to write Python, from the source of Python's own standard library.

Alone, with a worker inside (a quick look first, then about two million parameters)::

    python -m examples.tiny_gpt --size small
    python -m examples.tiny_gpt

With more workers, in other terminals, before or after::

    taskmesh worker examples.tiny_gpt:mesh

This module is what master and workers share: the workers import it, the master is ``__main__.py``.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from examples.tiny_gpt.corpus import Windows
from examples.tiny_gpt.model import TinyGPT
from taskmesh import Mesh
from taskmesh.training import Every, Int8, Trainer


@dataclass(frozen=True)
class Size:
    """How large a run is; ``batch`` samples of ``block`` bytes make a step."""

    layers: int
    width: int
    heads: int
    block: int
    batch: int
    steps: int
    checkpoint_every: int
    learning_rate: float


SIZES = {
    "small": Size(
        layers=2, width=64, heads=4, block=64, batch=32, steps=300, checkpoint_every=20, learning_rate=5e-3
    ),
    "full": Size(
        layers=4, width=192, heads=6, block=128, batch=16, steps=1000, checkpoint_every=50, learning_rate=2e-3
    ),
}


def build_model(size: Size) -> TinyGPT:
    return TinyGPT(layers=size.layers, width=size.width, heads=size.heads, block=size.block)


def loss(model: nn.Module, text: Tensor) -> Tensor:
    losses: Tensor = model(text)  # one a byte, not their mean
    return losses


def make_optimizer(parameters: Iterable[nn.Parameter], size: Size) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=size.learning_rate, betas=(0.9, 0.95))


def make_schedule(optimizer: torch.optim.Optimizer, size: Size) -> LambdaLR:
    """Up to the learning rate over the first twentieth of the steps, then down to a tenth of it along a cosine."""
    warm_up = size.steps // 20

    def factor(step: int) -> float:
        done = min(1.0, max(0.0, (step - warm_up) / (size.steps - warm_up)))
        return min(1.0, (step + 1) / warm_up) * (0.55 + 0.45 * math.cos(math.pi * done))

    return LambdaLR(optimizer, factor)


def make_trainer(name: str, size: Size) -> Trainer:
    return Trainer(
        mesh,
        name,
        model=functools.partial(build_model, size),
        loss=loss,
        data=Windows(size.block),
        optimizer=functools.partial(make_optimizer, size=size),
        schedule=functools.partial(make_schedule, size=size),
        shards=8,
        batch_size=size.batch,
        compression=Int8(),
        checkpoint=Every(steps=size.checkpoint_every, keep=4),
    )


mesh = Mesh("tiny_gpt")
# A run each: a worker serves both, and knows from a shard's queue which one it is of.
trainers = {name: make_trainer(name, size) for name, size in SIZES.items()}
trainer = trainers["full"]
