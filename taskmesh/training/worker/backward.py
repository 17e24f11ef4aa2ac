"""Buckets of a gradient as backward finishes them.

Backward reaches the last parameters first, and says of each when its gradient is complete. Whoever waits for a bucket
can have it then, while the rest is still being computed (Li et al., "PyTorch Distributed", 2020).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from taskmesh.tensors import FlatModel
from taskmesh.training.buckets import Bucket


class Backward:
    """Watches a model's backward passes.

    A bucket is told of once, when all its parameters have their gradients, or at ``finish``, when it has parameters
    that got none. One whose gradient changes after that (a parameter that several backward passes reach) is told of
    again at the end.
    """

    def __init__(self, flat: FlatModel, buckets: Sequence[Bucket]) -> None:
        self._flat = flat
        self._count = len(buckets)
        self._buckets_of: list[list[int]] = [
            [
                place
                for place, bucket in enumerate(buckets)
                if bucket.start < slot.offset + slot.size and slot.offset < bucket.stop
            ]
            for slot in flat.layout.parameters
        ]
        self._missing_at_first = [0] * len(buckets)
        for places in self._buckets_of:
            for place in places:
                self._missing_at_first[place] += 1
        self._missing: list[int] = []
        self._seen: set[int] = set()
        self._told: set[int] = set()
        self._changed: set[int] = set()
        self._tell: Callable[[int], None] | None = None
        for number, parameter in enumerate(flat.parameters()):
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    functools.partial(self._on_gradient, number)
                )

    def begin(self, tell: Callable[[int], None]) -> None:
        """A gradient begins; ``tell`` is called with the number of each bucket that is complete."""
        self._tell = tell
        self._missing = list(self._missing_at_first)
        self._seen.clear()
        self._told.clear()
        self._changed.clear()

    def finish(self) -> None:
        """All that comes has come: tell of the rest, and again of what has changed since."""
        tell, self._tell = self._tell, None
        assert tell is not None
        self._flat.collect_gradient()
        for place in range(self._count):
            if place not in self._told or place in self._changed:
                tell(place)

    def _on_gradient(self, number: int, _: Tensor) -> None:
        if self._tell is None:
            return
        self._flat.collect_gradient_of(number)
        if number in self._seen:
            self._changed.update(self._told.intersection(self._buckets_of[number]))
            return
        self._seen.add(number)
        for place in self._buckets_of[number]:
            self._missing[place] -= 1
            if not self._missing[place]:
                self._told.add(place)
                self._tell(place)
