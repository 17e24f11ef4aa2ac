"""A gradient's buckets summed over the ranks of a group, while backward is at the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from taskmesh.training.buckets import Bucket
from taskmesh.training.worker.ranks import Ranks


class Sums:
    """A gradient's buckets on the way to their sums over the ranks.

    They are summed in the order of their numbers, in whatever order they are complete here: all ranks must sum alike.
    ``tell`` is called in that order.

    Args:
        own: this rank's gradient, which is left as it is.
        into: where the sums are to lie, on the CPU.

    Attributes:
        late: buckets that have changed since they were added.
    """

    def __init__(
        self, ranks: Ranks, buckets: Sequence[Bucket], own: Tensor, into: Tensor, tell: Callable[[int], None]
    ) -> None:
        self._ranks = ranks
        self._buckets = buckets
        self._own = own
        self._into = into
        self._sums = into if own.device == into.device else torch.empty_like(own)
        self._tell = tell
        self._ready: set[int] = set()
        self._works: list[dist.Work] = []
        self._told = 0
        self.late: set[int] = set()

    def add(self, place: int) -> None:
        """A bucket is complete, or has changed since."""
        if place in self._ready:
            self.late.add(place)
            return
        self._ready.add(place)
        while len(self._works) in self._ready:
            self._begin(len(self._works))
        while self._told < len(self._works) and self._works[self._told].is_completed():
            self._tell_next()

    def finish(self) -> None:
        """All buckets were added: tell of the rest."""
        while self._told < len(self._buckets):
            self._tell_next()

    def settle(self) -> None:
        """Take part in the sums that others wait for, whatever has become of this rank's gradient."""
        while len(self._works) < len(self._buckets):
            self._begin(len(self._works))
        for work in self._works:
            self._ranks.finish(work)

    def repeat(self, places: Sequence[int]) -> None:
        """Sum some buckets again, and tell of them."""
        for place in places:
            self._begin(place)
            self._ranks.finish(self._works.pop())
            self._bring(place)

    def _slice(self, values: Tensor, place: int) -> Tensor:
        return values[self._buckets[place].start : self._buckets[place].stop]

    def _begin(self, place: int) -> None:
        sums = self._slice(self._sums, place)
        sums.copy_(self._slice(self._own, place))
        self._works.append(self._ranks.begin_sum(sums))

    def _tell_next(self) -> None:
        place = self._told
        self._told += 1
        self._ranks.finish(self._works[place])
        self._bring(place)

    def _bring(self, place: int) -> None:
        if self._sums is not self._into:
            self._slice(self._into, place).copy_(self._slice(self._sums, place))
        self._tell(place)


class Seen:
    """The sums on a rank that sends nothing."""

    def __init__(self, gradient: Tensor, buckets: Sequence[Bucket]) -> None:
        self.gradient = gradient.numpy()
        self._buckets = buckets
        self.is_finite = True

    def add(self, place: int) -> None:
        """A bucket is summed: the same bits as on the leader, which finds the same of them."""
        bucket = self._buckets[place]
        self.is_finite = self.is_finite and bool(np.isfinite(self.gradient[bucket.start : bucket.stop]).all())
