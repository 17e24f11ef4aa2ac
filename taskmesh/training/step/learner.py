"""The master's model and optimizer: steps them, and turns them into a version and back.

The master holds fp32 parameters in one flat buffer. Everything here runs in the process's compute thread.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from taskmesh.errors import CheckpointError
from taskmesh.tensors import FlatModel, drawing, is_finite
from taskmesh.training.compression.base import Compression
from taskmesh.training.compute import use_threads
from taskmesh.training.seeds import derive
from taskmesh.training.step.aggregate import Update, Values
from taskmesh.training.step.clipping import clip_norm
from taskmesh.training.step.downlink import Downlink, Sent, Step

OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]
ScheduleMaker = Callable[[Optimizer], LRScheduler]


def scale_of(staleness: int) -> float:
    """How far a step goes that so many others were taken before, since the version that its gradient is of."""
    return 1 / (1 + staleness)


class Learner:
    """Parameters, optimizer and schedule of one run.

    Args:
        downlink: by what the gradients are compressed by which all holders of the parameters step; None where only the
            master steps.
        clip: the largest norm of a step's mean gradient; a longer one is scaled down to it. None for any.

    Attributes:
        downlink: compresses and reads them.
        rate: the learning rate of the optimizer's first group in the last step; None before it, or where it has none.
        norm: of the last step's mean gradient, where it is clipped.
        sent: by what the last step was taken; None before it, and without a downlink.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        optimizer: OptimizerMaker,
        schedule: ScheduleMaker | None,
        seed: int,
        threads: int,
        downlink: Compression | None = None,
        clip: float | None = None,
    ) -> None:
        with drawing(derive(seed, "model", bits=64)):
            self.flat = FlatModel(build().float())
        self._seed = seed
        self._threads = threads
        self._optimizer = optimizer(self.flat.model.parameters())
        self._schedule = None if schedule is None else schedule(self._optimizer)
        self.downlink = None if downlink is None else Downlink(downlink, self.flat.layout, seed)
        self.sent: Sent | None = None
        self.rate: float | None = None
        self.norm: float | None = None
        self._clip = clip
        self._received: Values | None = None

    def apply(self, update: Update, step: int, scale: float = 1.0) -> str | None:
        """Take one step. Returns why the parameters that it led to cannot be used; None when they can.

        The optimizer draws the same random numbers in the same step (should it draw any).

        Args:
            scale: of the change that the optimizer makes of the gradient, and of the change of the buffers.
        """
        if self._clip is not None:
            self.norm = clip_norm(update.gradient, self._clip)
            if not math.isfinite(self.norm):
                return "the mean gradient is not finite"
        if scale != 1:
            return self._step_partly(update, step, scale)
        if self.downlink is not None:
            if not np.isfinite(update.gradient).all():
                return "the mean gradient is not finite"
            self.sent = self.downlink.compress(update, step)
        return self._step(update, step)

    def _step_partly(self, update: Update, step: int, scale: float) -> str | None:
        trained = self.flat.values[: self.flat.layout.parameter_count]
        before = trained.clone()
        reason = self._step(replace(update, floats=update.floats * np.float32(scale)), step)
        trained.sub_(before).mul_(scale).add_(before)
        return reason

    def follow(self, step: Step) -> None:
        """Take a step that a master has taken.

        Raises:
            DecodeError: it is damaged, or made with another compression.
        """
        assert self.downlink is not None
        if self._received is None:
            self._received = np.empty(self.flat.layout.parameter_count, np.float32)
        self._step(self.downlink.read(step.sent, self._received), step.step)

    def _step(self, update: Update, step: int) -> str | None:
        use_threads(self._threads)
        flat = self.flat
        flat.use_gradient(torch.from_numpy(update.gradient))
        rate = self._optimizer.param_groups[0].get("lr")
        self.rate = None if rate is None else float(rate)
        with drawing(derive(self._seed, "optimizer", step, bits=64)):
            self._optimizer.step()
            if isinstance(self._schedule, ReduceLROnPlateau):
                self._schedule.step(update.loss)
            elif self._schedule is not None:
                self._schedule.step()
        flat.floats.add_(torch.from_numpy(update.floats))
        flat.integers.copy_(torch.from_numpy(update.integers))
        flat.spread_buffers()
        # Of the buffers only the change: a mask may hold infinities all along.
        if not is_finite(flat.values[: flat.layout.parameter_count]):
            return "the parameters are not finite after the step"
        if not np.isfinite(update.floats).all():
            return "the buffers are not finite after the step"
        if not self._has_finite_state():
            return "the optimizer's state is not finite after the step"
        return None

    def _has_finite_state(self) -> bool:
        """A gradient may be finite and its square not: Adam would never move such a parameter again."""
        tensors = (
            value
            for state in self._optimizer.state.values()
            for value in state.values()
            if isinstance(value, Tensor) and value.is_floating_point() and value.dim()
        )
        return all(map(is_finite, tensors))

    def state(self) -> dict[str, Any]:
        """What the next steps depend on beside the parameters."""
        schedule = None if self._schedule is None else self._schedule.state_dict()
        state: dict[str, Any] = {
            "kinds": self._kinds(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": schedule,
        }
        if self.downlink is not None:
            state["unsent"] = self.downlink.state()
        return state

    def _kinds(self) -> list[str]:
        """What the optimizer and the schedule are: torch loads one's state into another without a word."""
        return [type(self._optimizer).__qualname__, type(self._schedule).__qualname__]

    def restore(self, parameters: memoryview, state: Mapping[str, Any]) -> None:
        """Go back to a version.

        Raises:
            CheckpointError: its parameters are another model's, or its state is another optimizer's.
        """
        if state.get("kinds", self._kinds()) != self._kinds():  # an older release did not note them
            raise CheckpointError(
                f"the checkpoint's optimizer or schedule is another one: {state.get('kinds')}, not {self._kinds()}"
            )
        self.flat.load(parameters)
        self.sent = None
        if self.downlink is not None:
            self.downlink.restore(state.get("unsent"))
        try:
            self._optimizer.load_state_dict(state["optimizer"])
            if self._schedule is not None:
                self._schedule.load_state_dict(state["schedule"])
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"the checkpoint's optimizer or schedule is another one's: {error}"
            ) from None
