"""Steps that a shard takes on its own, between two steps of the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from taskmesh.training.learner import OptimizerMaker, ScheduleMaker
from taskmesh.training.modes import LocalSteps


class Local(NamedTuple):
    """What a shard steps with."""

    optimizer: OptimizerMaker
    schedule: ScheduleMaker | None


class Inner:
    """An optimizer made for one round, its schedule at the step that the run has reached."""

    def __init__(self, local: Local, model: nn.Module, taken: int) -> None:
        self._optimizer = local.optimizer(model.parameters())
        self._schedule: LRScheduler | None = None
        if local.schedule is not None:
            self._schedule = local.schedule(self._optimizer)
            with warnings.catch_warnings():
                # It is the optimizer that is new, not the run.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)
                for _ in range(taken):
                    self._advance(0.0)

    def step(self, loss: Tensor) -> None:
        """Take a step down this (mean) loss."""
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._advance(float(loss.detach()))

    def _advance(self, loss: float) -> None:
        if isinstance(self._schedule, ReduceLROnPlateau):
            self._schedule.step(loss)
        elif self._schedule is not None:
            self._schedule.step()


def outer_optimizer(mode: LocalSteps) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Makes the optimizer of the run's own steps, whose gradient is the mean change that the shards made, reversed."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=mode.lr, momentum=mode.momentum, nesterov=mode.momentum > 0)

    return make
