"""A gradient in pieces: ranges of the flat buffer, about a chunk each, in the order in which backward finishes them.

Backward reaches the last parameters first. A bucket is done when all its parameters are, so that it can leave, and be
summed up elsewhere, while the rest is still being computed.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

from taskmesh.broker.chunks import CHUNK_BYTES
from taskmesh.tensors import FlatLayout, Slot

BUCKET_VALUES = CHUNK_BYTES // 4


class Bucket(NamedTuple):
    """Values ``start`` to ``stop`` of a flat gradient.

    Attributes:
        shapes: of the parameters in it, one after the other; none where it is a part of a single large one.
    """

    start: int
    stop: int
    shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def size(self) -> int:
        return self.stop - self.start


def cut(layout: FlatLayout, *, whole: bool = False) -> tuple[Bucket, ...]:
    """Cut a layout into buckets.

    Args:
        whole: leave every parameter in one piece, however large.
    """
    buckets: list[Bucket] = []
    gathered: list[Slot] = []

    def flush() -> None:
        if gathered:
            shapes = tuple(slot.shape for slot in gathered)
            stop = gathered[-1].offset + gathered[-1].size
            buckets.append(Bucket(gathered[0].offset, stop, shapes))
            gathered.clear()

    for slot in reversed(layout.parameters):
        if sum(each.size for each in gathered) + slot.size > BUCKET_VALUES:
            flush()
        if slot.size > BUCKET_VALUES and not whole:
            buckets += _parts(slot)
        elif slot.size:
            gathered.insert(0, slot)
    flush()
    return tuple(buckets)


def _parts(slot: Slot) -> list[Bucket]:
    """A large parameter in parts of nearly equal size."""
    count = math.ceil(slot.size / BUCKET_VALUES)
    ends = [slot.offset + slot.size * part // count for part in range(count + 1)]
    return [Bucket(start, stop) for start, stop in itertools.pairwise(ends)]
