"""Measures a run's versions in its master."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from taskmesh.errors import TrainingError
from taskmesh.events import Observers, Validated
from taskmesh.tensors import FlatModel, drawing
from taskmesh.training.compute import compute, use_threads
from taskmesh.training.seeds import derive
from taskmesh.training.setup import RunSetup
from taskmesh.training.validation import MetricHistory, Validate

log = logging.getLogger("taskmesh.training")


class Validator:
    """Takes one metric of one run, with a model of its own.

    Args:
        build: makes the model.
        threads: torch's, meanwhile.
    """

    def __init__(
        self,
        setup: RunSetup,
        validate: Validate,
        build: Callable[[], nn.Module],
        threads: int,
        observers: Observers,
    ) -> None:
        self._setup = setup
        self._validate = validate
        self._build = build
        self._threads = threads
        self._observers = observers
        self._flat: FlatModel | None = None

    @property
    def name(self) -> str:
        """The metric's."""
        return self._validate.name

    def is_due(self, step: int) -> bool:
        return self._validate.is_due(step)

    async def measure(self, parameters: memoryview, step: int) -> float:
        """The metric of the parameters of this step, which must not change meanwhile.

        Raises:
            TrainingError: the function that takes it failed.
        """
        began = time.monotonic()
        value = await compute(self._measure, parameters, step)
        log.info("run %s, step %d: %s %.6g", self._setup.name, step, self.name, value)
        seconds = time.monotonic() - began
        self._observers.emit(Validated(self._setup.name, step, self.name, value, seconds))
        return value

    def judge(self, value: float, history: MetricHistory) -> str | None:
        """Why a version of this metric must not be committed; None when it may."""
        return self._setup.divergence.judge_metric(self._validate, value, history)

    def _measure(self, parameters: memoryview, step: int) -> float:
        use_threads(self._threads)
        if self._flat is None:
            with drawing():
                self._flat = FlatModel(self._build())
        self._flat.load(parameters)
        seed = derive(self._setup.seed, "validation", step, bits=64)
        try:
            with drawing(seed), torch.no_grad():
                return float(self._validate.measure(self._flat.model.eval()))
        except Exception as error:
            raise TrainingError(
                f"run {self._setup.name!r}, step {step}: {self.name} could not be measured: {error!r}"
            ) from error
