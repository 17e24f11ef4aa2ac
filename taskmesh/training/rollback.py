"""When a run has gone wrong: a pure rule over its losses."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from taskmesh.errors import ConfigurationError
from taskmesh.training.validation import MetricHistory, Validate


@dataclass(frozen=True, slots=True)
class OnDivergence:
    """What counts as divergence, and how often a run may come back from it.

    A loss that is not finite always does. A finite one is a spike when it is above all of: ``factor`` times the
    median of the last ``window`` losses; that median plus ``deviations`` robust standard deviations (1.4826 times
    the median absolute deviation); ``floor`` times the median of the run's first losses. The last keeps a run that
    has come down to small losses from taking one hard batch for the end of the world.

    A metric (``Trainer(validate=...)``) has dropped when it is no number, or worse than the median of its last five
    values by more than ``metric_drop`` of that median: with 0.2 an accuracy of 0.7 after 0.9 is a drop, and one of 0.75
    is not. Nothing is a drop before there are three values.

    Attributes:
        window: losses that are looked back on; nothing is a spike before there are so many.
        recomputes: how often a shard that was refused is computed again, elsewhere where there is an elsewhere.
        metric_drop: by which share a metric may get worse; None for any.
        rollbacks: returns to one and the same checkpoint; one more ends the run with a TrainingError.
    """

    window: int = 20
    factor: float = 4.0
    deviations: float = 10.0
    floor: float = 0.5
    recomputes: int = 2
    rollbacks: int = 3
    metric_drop: float | None = None

    def __post_init__(self) -> None:
        if self.window < 2 or self.factor <= 1 or self.deviations < 0 or self.floor < 0:
            raise ConfigurationError(f"{self}: window from 2, factor above 1, deviations and floor from 0")
        if self.recomputes < 0 or self.rollbacks < 0:
            raise ConfigurationError(f"{self}: recomputes and rollbacks from 0")
        if self.metric_drop is not None and not self.metric_drop > 0:
            raise ConfigurationError(f"{self}: metric_drop above 0")

    def judge(self, loss: float, history: LossHistory) -> str | None:
        """Why a step of this mean loss must not be taken; None when it may."""
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if len(history.recent) < self.window:
            return None
        middle = statistics.median(history.recent)
        spread = 1.4826 * statistics.median(abs(value - middle) for value in history.recent)
        first = statistics.median(history.first)
        limit = max(self.factor * middle, middle + self.deviations * spread, self.floor * first)
        if loss <= limit:
            return None
        return f"the loss jumped from about {middle:.4g} to {loss:.4g}; the limit is {limit:.4g}"

    def judge_metric(self, validate: Validate, value: float, history: MetricHistory) -> str | None:
        """Why a version of this metric must not be committed; None when it may."""
        usual = history.usual
        if self.metric_drop is None or usual is None:
            return None
        if math.isfinite(value) and validate.worsening(value, usual) <= self.metric_drop * abs(usual):
            return None
        return f"{validate.name} went from about {usual:.4g} to {value:.4g}"


FIRST_LOSSES = 5


@dataclass(frozen=True, slots=True)
class LossHistory:
    """The losses that the rule looks at: part of a run's state, so that a resumed run decides as it would have."""

    first: tuple[float, ...] = ()
    recent: tuple[float, ...] = ()

    def add(self, loss: float, window: int) -> LossHistory:
        first = self.first if len(self.first) >= FIRST_LOSSES else (*self.first, loss)
        return LossHistory(first, (*self.recent, loss)[-window:])

    @classmethod
    def read(cls, first: Sequence[float], recent: Sequence[float]) -> LossHistory:
        return cls(tuple(map(float, first)), tuple(map(float, recent)))
