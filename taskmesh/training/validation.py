"""How good a run's versions are, measured as it goes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from taskmesh.errors import ConfigurationError

WINDOW = 5  # measurements that are looked back on
FEWEST = 3  # before there are so many, nothing is a drop


@dataclass(frozen=True, slots=True)
class Validate:
    """A metric of the model, taken in the master before a version is committed; the next step waits for it.

    Attributes:
        measure: from a model of its own with the version's parameters, in evaluation mode and without gradients, to a
            number. What it draws at random is seeded by the step.
        every: so many steps; those of ``Every(steps=)``, or a divisor, let each checkpoint have its value.
        name: of the metric, in manifests (``Every(best=name)``) and events.
        best_is: whether low values are good or high ones.
    """

    measure: Callable[[nn.Module], float]
    every: int = 50
    name: str = "validation"
    best_is: Literal["lowest", "highest"] = "lowest"

    def __post_init__(self) -> None:
        if self.every < 1 or self.best_is not in ("lowest", "highest"):
            raise ConfigurationError(f"{self}: every from 1, best_is 'lowest' or 'highest'")
        if not self.name or self.name == "loss":
            raise ConfigurationError(f"a metric cannot have the name {self.name!r}")

    def is_due(self, step: int) -> bool:
        return step % self.every == 0

    def worsening(self, value: float, before: float) -> float:
        """How much worse a value is than one before."""
        return value - before if self.best_is == "lowest" else before - value


@dataclass(frozen=True, slots=True)
class MetricHistory:
    """What was measured: part of a run's state, so that a resumed run decides as it would have.

    Attributes:
        recent: the newest values that were no drop.
        step, drawn: where the run stood at the last of them, as in ``Progress``.
    """

    recent: tuple[float, ...] = ()
    step: int = 0
    drawn: int = 0

    def add(self, value: float, step: int, drawn: int) -> MetricHistory:
        return MetricHistory((*self.recent, value)[-WINDOW:], step, drawn)

    @property
    def usual(self) -> float | None:
        """The median of the recent values, which one lucky or unlucky value does not move; None while there are few."""
        return statistics.median(self.recent) if len(self.recent) >= FEWEST else None

    @classmethod
    def read(cls, state: Mapping[str, Any] | None) -> MetricHistory:
        if state is None:  # an older release had none
            return cls()
        return cls(tuple(map(float, state["recent"])), int(state["step"]), int(state["drawn"]))
