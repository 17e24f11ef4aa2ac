"""How the gradients of a step's shards become one: their mean, or what withstands a few that are wrong.

The mean takes whatever it is given; one shard of bad labels or a worker that computes nonsense moves it as far as it
likes. A trimmed mean or a median, coordinate by coordinate, is moved by no more than the shards that it keeps (Yin et
al., "Byzantine-Robust Distributed Learning", 2018). It pays with noise: on clean data it uses less of what it was
given. Shards count alike then, whatever their samples.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from taskmesh.errors import ConfigurationError

Values = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Mean:
    """The mean over all samples. It is summed as the shards come."""

    @property
    def name(self) -> str:
        return "mean"

    def check(self, shards: int) -> None:
        """Any number of shards will do."""


class Robust(Protocol):
    """One gradient of the shards' mean gradients, each coordinate for itself."""

    @property
    def name(self) -> str: ...

    def check(self, shards: int) -> None:
        """See that it can work with so many shards.

        Raises:
            ConfigurationError: it cannot.
        """
        ...

    def reduce(self, means: Sequence[Values]) -> Values:
        """From the shards' mean gradients, in the order of the shards."""
        ...


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The mean of each coordinate without the largest and the smallest.

    Attributes:
        share: of the shards that is left out at each end, rounded up.
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if not 0 < self.share < 0.5:
            raise ConfigurationError(f"{self}: share is above 0 and below 0.5")

    @property
    def name(self) -> str:
        return f"trimmed mean {self.share:g}"

    def check(self, shards: int) -> None:
        if 2 * self._cut(shards) >= shards:
            raise ConfigurationError(f"{self} leaves nothing of {shards} shards")

    def _cut(self, shards: int) -> int:
        return math.ceil(self.share * shards - 1e-9)

    def reduce(self, means: Sequence[Values]) -> Values:
        cut = min(self._cut(len(means)), (len(means) - 1) // 2)  # a short batch may have fewer shards
        kept = np.sort(np.stack(means), axis=0)[cut : len(means) - cut]
        return _mean(kept)


@dataclass(frozen=True, slots=True)
class Median:
    """The median of each coordinate."""

    @property
    def name(self) -> str:
        return "median"

    def check(self, shards: int) -> None:
        if shards < 3:
            raise ConfigurationError(f"a median of {shards} shards withstands nothing: give it at least 3")

    def reduce(self, means: Sequence[Values]) -> Values:
        ordered = np.sort(np.stack(means), axis=0)
        half = len(means) // 2
        return _mean(ordered[half : half + 1] if len(means) % 2 else ordered[half - 1 : half + 1])


Aggregation = Mean | TrimmedMean | Median


def _mean(rows: Values) -> Values:
    """Over the rows, one after the other: a fixed order."""
    total: Values = rows[0].copy()
    for row in rows[1:]:
        total += row
    total /= np.float32(len(rows))
    return total
