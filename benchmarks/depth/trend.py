"""Growth over a run, and whether it is more than noise. Pure functions."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 20


@dataclass(frozen=True)
class Growth:
    """The least-squares slope times the duration; ``noise`` is two standard errors of it."""

    growth: float
    noise: float

    @property
    def is_noise(self) -> bool:
        return abs(self.growth) <= self.noise


def growth(times: Sequence[float], values: Sequence[float]) -> Growth:
    """How much the values rose over the run.

    The error is that of a line through the means of 20 stretches: samples that follow each other resemble each other,
    and each by itself would count for too much.
    """
    points = _means(times, values)
    if len(points) < 3:
        raise ValueError(f"{len(values)} samples are too few for a trend")
    middle = sum(t for t, _ in points) / len(points)
    mean = sum(v for _, v in points) / len(points)
    spread = sum((t - middle) ** 2 for t, _ in points)
    slope = sum((t - middle) * (v - mean) for t, v in points) / spread
    squares = sum((v - mean - slope * (t - middle)) ** 2 for t, v in points)
    error = math.sqrt(squares / (len(points) - 2) / spread)
    duration = times[-1] - times[0]
    return Growth(slope * duration, 2 * error * duration)


def _means(times: Sequence[float], values: Sequence[float]) -> list[tuple[float, float]]:
    bounds = [len(times) * block // BLOCKS for block in range(BLOCKS + 1)]
    spans = [(first, end) for first, end in itertools.pairwise(bounds) if end > first]
    return [(_mean(times[first:end]), _mean(values[first:end])) for first, end in spans]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
