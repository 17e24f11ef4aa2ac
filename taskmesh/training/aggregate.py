"""Sums over shards that come out the same, bit for bit, whoever computed what and in whatever order it came.

Floating-point sums depend on the order of the additions. Here it is fixed by the shards' numbers alone: a balanced
binary tree, in which a shard without a neighbour moves up a level unchanged. Each addition is done when both of
its sides are there, so that a round holds few more gradients than came out of turn.

What becomes of buffers: the changes of float buffers (BatchNorm's running statistics) are averaged over the shards,
weighted by their counts, and added; integer buffers are taken from the lowest shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float32]


class TreeSum:
    """The sum of ``leaves`` arrays of one shape, which may come in any order. It takes them over and changes them."""

    def __init__(self, leaves: int) -> None:
        self._widths = [leaves]
        while self._widths[-1] > 1:
            self._widths.append((self._widths[-1] + 1) // 2)
        self._nodes: dict[tuple[int, int], Values] = {}
        self._added: set[int] = set()

    @property
    def is_complete(self) -> bool:
        return len(self._added) == self._widths[0]

    def add(self, leaf: int, values: Values) -> None:
        """Put in one leaf, from 0; each exactly once."""
        if leaf in self._added or not 0 <= leaf < self._widths[0]:
            raise ValueError(f"leaf {leaf} of {self._widths[0]} is there already, or is none")
        self._added.add(leaf)
        level, place = 0, leaf
        while level < len(self._widths) - 1:
            neighbour = place ^ 1
            if neighbour < self._widths[level]:
                other = self._nodes.pop((level, neighbour), None)
                if other is None:
                    break
                left, right = (values, other) if place < neighbour else (other, values)
                left += right
                values = left
            level, place = level + 1, place // 2
        self._nodes[level, place] = values

    def total(self) -> Values:
        """The sum, when all leaves are there."""
        if not self.is_complete:
            raise ValueError(f"{len(self._added)} of {self._widths[0]} leaves are there")
        return self._nodes[len(self._widths) - 1, 0]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one shard brings to a step. Sums and a count travel, never means.

    Attributes:
        loss_sum: over its samples (or tokens).
        count: of them.
        gradient: of ``loss_sum``; shape (parameter_count,).
        floats: the change of its float buffers in the forward pass; shape (floats,).
        integers: its integer buffers; shape (integers,).
    """

    loss_sum: float
    count: int
    gradient: Values
    floats: Values
    integers: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Update:
    """A step's sums as means over all its samples.

    Attributes:
        loss: mean loss.
        count: samples (or tokens).
        gradient: of the mean loss; shape (parameter_count,).
        floats: mean change of the float buffers.
    """

    loss: float
    count: int
    gradient: Values
    floats: Values
    integers: npt.NDArray[np.int64]


class Round:
    """Collects the contributions of one step's shards."""

    def __init__(self, shards: int) -> None:
        self._gradients = TreeSum(shards)
        self._floats = TreeSum(shards)
        self._losses: list[float] = [0.0] * shards
        self._counts: list[int] = [0] * shards
        self._integers: npt.NDArray[np.int64] | None = None

    def add(self, shard: int, contribution: Contribution) -> None:
        """Take one shard's contribution over; its arrays are used up."""
        self._losses[shard] = contribution.loss_sum
        self._counts[shard] = contribution.count
        self._gradients.add(shard, contribution.gradient)
        self._floats.add(shard, contribution.floats * np.float32(contribution.count))
        if shard == 0:
            self._integers = contribution.integers

    @property
    def count(self) -> int:
        """Samples (or tokens) of the shards that are there."""
        return sum(self._counts)

    @property
    def loss(self) -> float:
        """Mean loss of the shards that are there."""
        return _pairwise(self._losses) / max(1, self.count)

    def update(self) -> Update:
        """The step's means, when every shard is there and anything counts."""
        assert self._integers is not None
        count = self.count
        gradient, floats = self._gradients.total(), self._floats.total()
        gradient /= np.float32(count)
        floats /= np.float32(count)
        return Update(self.loss, count, gradient, floats, self._integers)


def _pairwise(values: Sequence[float]) -> float:
    """The same tree for plain numbers."""
    level = list(values)
    while len(level) > 1:
        level = [sum(level[place : place + 2]) for place in range(0, len(level), 2)]
    return level[0]
