"""Steps that a shard takes on its own, between two steps of the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LRScheduler

from taskmesh.training.modes import LocalSteps
from taskmesh.training.step.learner import OptimizerMaker, ScheduleMaker


class Local(NamedTuple):
    """What a shard steps with, and how many steps it takes in a round."""

    optimizer: OptimizerMaker
    schedule: ScheduleMaker | None
    steps: int
    clip: float | None = None


class Inner:
    """An optimizer made for one round, its schedule at the step that the run has reached."""

    def __init__(self, local: Local, model: nn.Module, taken: int) -> None:
        self._optimizer = local.optimizer(model.parameters())
        self._clip = local.clip
        self._schedule: LRScheduler | None = None
        if local.schedule is not None:
            self._schedule = local.schedule(self._optimizer)
            with warnings.catch_warnings():
                # It is the optimizer that is new, not the run.
                warnings.filterwarnings("ignore", "Detected call of `lr_scheduler", UserWarning)
                for _ in range(taken):
                    self._schedule.step()

    def begin(self) -> None:
        """A step begins."""
        self._optimizer.zero_grad()

    def step(self, count: int) -> None:
        """Take a step down the mean of so many losses, of whose sum there is the gradient."""
        if not count:
            return
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(count)
        if self._clip is not None:
            groups = self._optimizer.param_groups
            every = [parameter for group in groups for parameter in group["params"]]
            nn.utils.clip_grad_norm_(every, self._clip)
        self._optimizer.step()
        if self._schedule is not None:
            self._schedule.step()


def outer_optimizer(mode: LocalSteps) -> Callable[[Iterable[nn.Parameter]], Optimizer]:
    """Makes the optimizer of the run's own steps, whose gradient is the mean change that the shards made, reversed."""

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return SGD(parameters, lr=mode.lr, momentum=mode.momentum, nesterov=mode.momentum > 0)

    return make
