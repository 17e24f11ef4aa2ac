"""Runs that groups compute; imported by the tests, and by the ranks that torchrun starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from taskmesh import Mesh
from taskmesh.training import Every, Execution, NoCompression, Trainer
from taskmesh.training.parallel import Parallel
from tests.integration.cli_support import ROOT, children, environment


class Rows:
    """Rows of noise, and what a fixed map makes of them."""

    def __init__(self, count: int = 500) -> None:
        draw = torch.Generator().manual_seed(0)
        self.rows = torch.rand((count, 64), generator=draw)
        self.labels = (self.rows @ torch.randn((64, 10), generator=draw)).argmax(dim=1)

    def __len__(self) -> int:
        return len(self.rows)

    def fetch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        chosen = list(indices)
        return self.rows[chosen], self.labels[chosen]


class Branches(nn.Module):
    """A part that only some samples take, a layer that backward reaches twice, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)
        self.wide = nn.Linear(64, 6000)  # more than a bucket
        self.outer = nn.Linear(6000, 10)
        self.few = nn.Linear(64, 64)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        taken = rows[:, 20] > 0.8
        again: Tensor = checkpoint(self.inner, rows.clone().requires_grad_(), use_reentrant=True)
        rows = torch.tanh(self.inner(rows) + again)
        if taken.any():
            rows = rows + taken[:, None] * self.few(rows)
        logits: Tensor = self.outer(torch.tanh(self.wide(rows)))
        return logits


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))


def with_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 10))


def with_norm() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 10))


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    rows, labels = batch
    return nn.functional.cross_entropy(model(rows), labels, reduction="none")


def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    if rank() == 1:
        raise ValueError("a sample that nobody can read")
    return loss(model, batch)


def narrow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Memory for four samples, on one of the ranks."""
    if rank() == 1 and len(batch[0]) > 4:
        raise MemoryError("no room")
    return loss(model, batch)


def slow(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    time.sleep(0.02)
    return loss(model, batch)


def fsdp() -> Parallel:
    from tests.integration.group_parallel import Fsdp  # a second to import, for one run of many

    return Fsdp()


def ddp() -> Parallel:
    from tests.integration.group_parallel import Ddp

    return Ddp()


TINY: dict[str, Any] = {"shards": 4, "batch_size": 6, "data": Rows(15)}  # shards of one sample among them
RUNS: dict[str, dict[str, Any]] = {
    "branches": {"model": Branches, "group": 2, "shards": 3, "batch_size": 100},
    "tiny": {**TINY, "group": 2, "execution": Execution(micro_batch=1)},
    "norm": {"model": with_norm, "group": 2, "shards": 1, "batch_size": 7},
    "chance": {"model": with_dropout, "group": 2, "compression": None, "checkpoint": Every(steps=3)},
    "failing": {"loss": failing, "group": 2},
    "narrow": {"loss": narrow, "deterministic": False, "shards": 2, "batch_size": 40},
    "fsdp": {**TINY, "group": 2, "execution": Execution(parallel=fsdp, micro_batch=1)},
    "ddp": {**TINY, "group": 2, "execution": Execution(parallel=ddp)},
    "any": {"loss": slow, "deterministic": False},
}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """What is rounded otherwise leads a little elsewhere; Adam would lead far, where gradients are small."""
    return torch.optim.SGD(parameters, lr=0.1)


def make(mesh: Mesh, name: str, **changes: Any) -> Trainer:
    usual = {"model": linear, "loss": loss, "data": Rows(), "optimizer": sgd, "batch_size": 128}
    return Trainer(mesh, name, **{**usual, "compression": NoCompression(), **RUNS[name], **changes})


class Ranks:
    """A worker of two ranks; what they say is in a file."""

    def __init__(self, url: str, log: Path) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += ["-m", "taskmesh", "worker", "tests.integration.group_app:mesh", "--group", "-c", "2"]
        self._log = log
        with log.open("w") as output:
            variables = {**environment(url), "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(command, cwd=ROOT, env=variables, stderr=output)

    @property
    def text(self) -> str:
        return self._log.read_text()

    def pid(self, rank: int) -> int:
        """The process of a rank."""
        name = f"RANK={rank}".encode()
        of_rank = [
            pid
            for pid in children(self.process.pid)
            if name in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        ]
        return of_rank[0]

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(self.pid(rank), number)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
        self.process.wait(60)


mesh = Mesh("groups")
for each in RUNS:
    make(mesh, each)
