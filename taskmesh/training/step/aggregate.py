"""Sums over shards that come out the same, bit for bit, whoever computed what and in whatever order it came.

Floating-point sums depend on the order of the additions. Here it is fixed by the shards' numbers alone: a balanced
binary tree, in which a shard without a neighbour, or next to one that is left out, moves up a level unchanged. Each
bucket of the gradient has a tree of its own, and each addition is done when both of its sides are there: few gradients
are held, and a step's sum is ready soon after its last bucket has come.

What becomes of buffers: the changes of float buffers (BatchNorm's running statistics) are averaged over the shards,
weighted by their counts, and added; integer buffers are taken from the lowest shard that is there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from taskmesh.training.buckets import Bucket
from taskmesh.training.robust import Mean, Robust
from taskmesh.training.setup import RunSetup

Values = npt.NDArray[np.float32]
KEPT_ARRAYS = 8
Node = tuple[int, Values]  # the lowest leaf below it, in whose array its sum lies


class TreeSum:
    """The sum of ``leaves`` arrays of one shape, which may come in any order. It takes them over and changes them.

    Some may be left out: the sum is then that of the others, in the same tree.
    """

    def __init__(self, leaves: int) -> None:
        self._widths = [leaves]
        while self._widths[-1] > 1:
            self._widths.append((self._widths[-1] + 1) // 2)
        self._nodes: dict[tuple[int, int], Node | None] = {}
        self._added: set[int] = set()
        self._left_out: set[int] = set()

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._added

    @property
    def is_complete(self) -> bool:
        return len(self._added) + len(self._left_out) == self._widths[0]

    def add(self, leaf: int, values: Values) -> list[int]:
        """Put in one leaf, from 0; each exactly once. Returns the leaves whose arrays are not needed any more."""
        self._check(leaf)
        self._added.add(leaf)
        return self._put(leaf, (leaf, values))

    def leave_out(self, leaf: int) -> list[int]:
        """A leaf will not come. Returns the leaves whose arrays are not needed any more."""
        self._check(leaf)
        self._left_out.add(leaf)
        return self._put(leaf, None)

    def _check(self, leaf: int) -> None:
        if leaf in self._added or leaf in self._left_out or not 0 <= leaf < self._widths[0]:
            raise ValueError(f"leaf {leaf} of {self._widths[0]} is there already, or is none")

    def _put(self, leaf: int, node: Node | None) -> list[int]:
        done: list[int] = []
        level, place = 0, leaf
        while level < len(self._widths) - 1:
            neighbour = place ^ 1
            if neighbour < self._widths[level]:
                if (level, neighbour) not in self._nodes:
                    break
                node = _join(node, self._nodes.pop((level, neighbour)), done)
            level, place = level + 1, place // 2
        self._nodes[level, place] = node
        return done

    def total(self) -> Values:
        """The sum, in the array of the lowest leaf that is there, when no more will come."""
        root = self._nodes.get((len(self._widths) - 1, 0)) if self.is_complete else None
        if root is None:
            raise ValueError(f"{len(self._added)} of {self._widths[0]} leaves are there")
        return root[1]

    def finish(self, counts: Sequence[int]) -> None:
        """Leave the mean over so many samples in the array of the lowest leaf that is there."""
        total = self.total()
        np.divide(total, np.float32(max(1, sum(counts))), out=total)


def _join(one: Node | None, other: Node | None, done: list[int]) -> Node | None:
    """The sum of two neighbours, in the array of the lower leaf; the other is noted as done."""
    if one is None or other is None:
        return one or other
    left, right = sorted((one, other), key=lambda node: node[0])
    np.add(left[1], right[1], out=left[1])
    done.append(right[0])
    return left


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one shard brings to a step beside its gradient. Sums and a count travel, never means.

    Attributes:
        loss_sum: over its samples (or tokens).
        count: of them.
        floats: the change of its float buffers in the forward pass; shape (floats,).
        integers: its integer buffers; shape (integers,).
    """

    loss_sum: float
    count: int
    floats: Values = field(default_factory=lambda: np.empty(0, np.float32))
    integers: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))


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


class Pool:
    """Arrays of one size that are used again: to touch fresh memory costs as much as to fill it."""

    def __init__(self, size: int, kept: int = KEPT_ARRAYS) -> None:
        self._size = size
        self._kept = kept
        self._free: list[Values] = []

    def take(self) -> Values:
        """Any thread."""
        try:
            return self._free.pop()
        except IndexError:
            return np.empty(self._size, np.float32)

    def give(self, values: Values) -> None:
        """Any thread."""
        if len(self._free) < self._kept:
            self._free.append(values)


class Stack:
    """The arrays of ``leaves`` shards, until all are there that will come."""

    def __init__(self, leaves: int, robust: Robust) -> None:
        self._leaves = leaves
        self._robust = robust
        self._values: dict[int, Values] = {}
        self._left_out: set[int] = set()

    def __contains__(self, leaf: object) -> bool:
        return leaf in self._values

    @property
    def is_complete(self) -> bool:
        return len(self._values) + len(self._left_out) == self._leaves

    def add(self, leaf: int, values: Values) -> list[int]:
        """Put in one leaf, from 0; each exactly once."""
        self._check(leaf)
        self._values[leaf] = values
        return self._done()

    def leave_out(self, leaf: int) -> list[int]:
        """A leaf will not come."""
        self._check(leaf)
        self._left_out.add(leaf)
        return self._done()

    def _check(self, leaf: int) -> None:
        if leaf in self._values or leaf in self._left_out or not 0 <= leaf < self._leaves:
            raise ValueError(f"leaf {leaf} of {self._leaves} is there already, or is none")

    def _done(self) -> list[int]:
        return sorted(self._values)[1:] if self.is_complete else []

    def finish(self, counts: Sequence[int]) -> None:
        """Leave one gradient in the array of the lowest leaf that is there. The others are free then."""
        leaves = sorted(self._values)
        means = [self._values[leaf] / np.float32(counts[leaf]) for leaf in leaves if counts[leaf]]
        if means:
            self._values[leaves[0]][:] = self._robust.reduce(means)


class Round:
    """Collects the contributions of one step's shards.

    A shard is opened with its contribution, its gradient is written into ``memory``, and each bucket is added when it
    is there; other threads may do so. What was added stays, should the rest have to be computed again. Shards of which
    nothing was added may be left out.
    """

    def __init__(
        self, shards: int, buckets: Sequence[Bucket], pool: Pool, robust: Robust | None = None
    ) -> None:
        self._shards = shards
        self._buckets = buckets
        self._pool = pool
        self._sums: list[TreeSum] | list[Stack] = (
            [TreeSum(shards) for _ in buckets] if robust is None else [Stack(shards, robust) for _ in buckets]
        )
        self._locks = [threading.Lock() for _ in buckets]
        self._contributions: dict[int, Contribution] = {}
        self._memory: dict[int, Values] = {}
        self._left: dict[int, int] = {}
        self._freeing = threading.Lock()

    def open(self, shard: int, contribution: Contribution) -> None:
        """Begin with a shard, or begin again; or, at its end, with its buffers."""
        self._contributions[shard] = contribution
        self.prepare(shard)

    def prepare(self, shard: int) -> None:
        """See that there is memory for a shard."""
        if shard not in self._left:
            self._memory[shard] = self._pool.take()
            self._left[shard] = len(self._buckets)

    def has(self, shard: int, bucket: int) -> bool:
        """Whether a bucket of a shard was added."""
        return shard in self._sums[bucket]

    def memory(self, shard: int, bucket: int) -> Values:
        """Where a bucket of an open shard belongs that was not added yet."""
        place = self._buckets[bucket]
        return self._memory[shard][place.start : place.stop]

    def add(self, shard: int, bucket: int) -> None:
        """A bucket is in its memory."""
        with self._locks[bucket]:
            done = self._sums[bucket].add(shard, self.memory(shard, bucket))
            self._finish(bucket)
        for each in done:
            self._free(each)

    def is_open(self, shard: int) -> bool:
        """Whether it counts already."""
        return shard in self._contributions

    def leave_out(self, shard: int) -> None:
        """A shard that is not open will not come: the step is that of the others."""
        for bucket, lock in enumerate(self._locks):
            with lock:
                done = self._sums[bucket].leave_out(shard)
                self._finish(bucket)
            for each in done:
                self._free(each)

    def _finish(self, bucket: int) -> None:
        """Make the mean of a bucket whose last shard is there."""
        if self._sums[bucket].is_complete:  # so every shard that will come is open, and every count is known
            contributions = map(self._contributions.get, range(self._shards))
            self._sums[bucket].finish([0 if each is None else each.count for each in contributions])

    def _free(self, shard: int) -> None:
        with self._freeing:
            self._left[shard] -= 1
            is_done = not self._left[shard]
        if is_done:
            self._pool.give(self._memory.pop(shard))

    def release(self) -> None:
        """The round is over: its memory may be used again."""
        while self._memory:
            self._pool.give(self._memory.popitem()[1])

    @property
    def count(self) -> int:
        """Samples (or tokens) of the shards that are there."""
        return sum(each.count for each in self._contributions.values())

    @property
    def loss(self) -> float:
        """Mean loss of the shards that are there."""
        losses = [
            self._contributions[shard].loss_sum if shard in self._contributions else 0.0
            for shard in range(self._shards)
        ]
        return _pairwise(losses) / max(1, self.count)

    def update(self) -> Update:
        """The step's means, when all is there that will come, and counts. The gradient lies in the round's memory."""
        if not all(each.is_complete for each in self._sums):
            raise ValueError("some shard's gradient is not whole")
        floats = TreeSum(self._shards)
        for shard in range(self._shards):
            each = self._contributions.get(shard)
            if each is None:
                floats.leave_out(shard)
            else:
                floats.add(shard, each.floats * np.float32(each.count))
        changes = floats.total() / np.float32(self.count)
        first = min(self._contributions)
        return Update(
            self.loss, self.count, self._memory[first], changes, self._contributions[first].integers
        )


def new_round(setup: RunSetup, shards: int, buckets: Sequence[Bucket], pool: Pool) -> Round:
    """A round of so many shards, which become one gradient as the run wants it."""
    aggregation = setup.aggregation
    return Round(shards, buckets, pool, None if isinstance(aggregation, Mean) else aggregation)


def _pairwise(values: Sequence[float]) -> float:
    """The same tree for plain numbers."""
    level = list(values)
    while len(level) > 1:
        level = [sum(level[place : place + 2]) for place in range(0, len(level), 2)]
    return level[0]
