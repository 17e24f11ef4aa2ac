"""A small run that tests train; imported by the tests and by the processes that they start and kill.

As a program: ``python training_support.py worker``, or ``master STEPS KILL_AT`` (it kills itself right after the
commit of step KILL_AT). The server is ``TASKMESH_URL``; with ``TASKMESH_TEST_COMPRESSION=topk`` gradients are sparse.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from taskmesh import Mesh, WorkerSettings
from taskmesh.events import Committed, Event
from taskmesh.testing.faults import arm_from_environment
from taskmesh.training import Every, TopK, Trainer

SAMPLES = 1500
ONE = WorkerSettings(concurrency=1)
_images, _labels = load_digits(return_X_y=True)
_order = torch.randperm(len(_images), generator=torch.Generator().manual_seed(0))
IMAGES = torch.tensor(_images, dtype=torch.float32)[_order] / 16
LABELS = torch.tensor(_labels)[_order]


class Digits:
    """The first ``samples`` digits; what is held out follows them."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = list(indices)
        return IMAGES[chosen], LABELS[chosen]


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10))


def build_wide() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))


def build_broad() -> nn.Module:
    """Large enough for what travels to be worth sharing on a machine."""
    return nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 10))


def build_with_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return nn.functional.cross_entropy(model(inputs), targets, reduction="none")


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def cosine(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)


def make_trainer(mesh: Mesh, name: str = "digits", **changes: Any) -> Trainer:
    arguments: dict[str, Any] = {
        "model": build,
        "loss": loss,
        "data": Digits(),
        "optimizer": adam,
        "schedule": cosine,
        "batch_size": 128,
        "checkpoint": Every(steps=10, keep=2),
    }
    return Trainer(mesh, name, **{**arguments, **changes})


@contextlib.asynccontextmanager
async def workers(mesh: Mesh, count: int) -> AsyncIterator[None]:
    """So many workers, each with one shard at a time."""
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(mesh.worker(ONE))
        yield


class Recorder:
    """An observer that keeps what happened."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def on_event(self, event: Event) -> None:
        self.events.append(event)

    def of(self, kind: type[Any]) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def start_program(url: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """This module as a process of its own."""
    variables = {**os.environ, "TASKMESH_URL": url, "TASKMESH_LIVENESS_TTL": "1", **environment}
    return subprocess.Popen([sys.executable, __file__, *arguments], env=variables)


async def serve(mesh: Mesh) -> None:
    async with mesh.worker(ONE):
        await asyncio.Future()


async def lead(mesh: Mesh, trainer: Trainer, steps: int, kill_at: int) -> None:
    def on_commit(committed: Committed) -> None:
        if committed.step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    async with mesh:
        await trainer.run(steps=steps, on_commit=on_commit)


def main() -> None:
    mesh = Mesh("test")
    remembers = os.environ.get("TASKMESH_TEST_COMPRESSION") == "topk"
    trainer = make_trainer(mesh, **({"compression": TopK(0.05)} if remembers else {}))
    if sys.argv[1] == "worker":
        arm_from_environment(mesh)
        asyncio.run(serve(mesh))
    else:
        asyncio.run(lead(mesh, trainer, int(sys.argv[2]), int(sys.argv[3])))


if __name__ == "__main__":
    main()
