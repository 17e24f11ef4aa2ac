"""Where a step's time goes, by what hooks of a run see: orders, parameters, backward, results, optimizer, commits."""

from __future__ import annotations

import dataclasses
import itertools
import os
import statistics
import struct
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.training.works import Work
from taskmesh import Call, Mesh, Next
from taskmesh.training import Dataset

RECORD = struct.Struct("<dI")
ORDER, FETCHED, COMPUTED, HANDED_IN, REDUCED, STEPPED, COMMITTED = KINDS = range(7)
# What passes from one moment to the next.
PARTS = ("publish", "parameters", "compute", "upload", "download_and_reduce", "optimizer", "commit")


class Stopwatch:
    """Notes moments (monotonic seconds) in a file that several processes share."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def mark(self, kind: int) -> None:
        os.write(self._file, RECORD.pack(time.monotonic(), kind))

    async def around_handler(self, call: Call, call_next: Next) -> Any:
        """A middleware."""
        self.mark(ORDER)
        try:
            return await call_next(call)
        finally:
            self.mark(HANDED_IN)


class _Watched:
    """Data whose ``fetch`` tells that the parameters are there."""

    def __init__(self, data: Dataset[Any], stopwatch: Stopwatch) -> None:
        self._data = data
        self._stopwatch = stopwatch

    def __len__(self) -> int:
        return len(self._data)

    def fetch(self, indices: Sequence[int]) -> Any:
        self._stopwatch.mark(FETCHED)
        return self._data.fetch(indices)


def watch(mesh: Mesh, work: Work, stopwatch: Stopwatch) -> Work:
    """The same work, with its moments noted."""

    def build() -> nn.Module:
        model = work.model()
        first = next(model.parameters())  # the last that backward reaches
        first.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _: stopwatch.mark(COMPUTED)
        )
        return model

    def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = work.optimizer(parameters)
        optimizer.register_step_pre_hook(lambda *_: stopwatch.mark(REDUCED))
        optimizer.register_step_post_hook(lambda *_: stopwatch.mark(STEPPED))
        return optimizer

    mesh.middleware.append(stopwatch.around_handler)
    return dataclasses.replace(
        work, model=build, data=_Watched(work.data, stopwatch), optimizer=make_optimizer
    )


def read_parts(path: Path) -> dict[str, float]:
    """Median seconds of each part of a step, over the last two thirds of the steps.

    A part ends with the last process that comes to its end: the parts add up to the step.
    """
    steps: list[list[float]] = []
    last = dict.fromkeys(KINDS, 0.0)
    begun = 0.0
    for at, kind in sorted(RECORD.iter_unpack(path.read_bytes())):
        last[kind] = at
        if kind == COMMITTED:
            moments = [begun, *(last[each] for each in KINDS)]
            steps.append([later - earlier for earlier, later in itertools.pairwise(moments)])
            begun = at
    chosen = steps[max(1, len(steps) // 3) :]
    return {part: statistics.median(step[place] for step in chosen) for place, part in enumerate(PARTS)}
