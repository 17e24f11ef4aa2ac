"""Deep gradient compression: Top-K that carries the momentum (Lin, Han, Mao, Wang, Dally, "Deep Gradient Compression",
2018).

A value that waits for its turn misses the momentum that it would have gathered at the master. So the momentum is kept
where the gradient is made, one for each logical shard, and what waits is the sum of the velocity::

    velocity      = momentum * velocity + gradient
    accumulation += velocity

The largest values of the accumulation are sent and taken off it. The velocity of a value that was sent is set to zero
(factor masking): a direction that was held back for long must not push on when it is out of date. The optimizer at
the master then has no momentum of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from taskmesh.errors import ConfigurationError
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression, Memory, Values, add_bounded, remembered
from taskmesh.training.compression.sparse import (
    check_density,
    find_largest,
    how_many,
    pack_sparse,
    unpack_sparse,
)
from taskmesh.training.compression.sums import sum_in_order

METHOD = 5
_MOST_STEPS = np.float32(2**24)  # beyond, fp32 does not count


@dataclass(frozen=True, slots=True)
class DGC(Compression):
    """Top-K with momentum correction, factor masking, clipping and a density that falls during a warm-up.

    Attributes:
        density: the share of each bucket's values that is sent after the warm-up, above 0, at most 1.
        momentum: of the velocity; from 0, below 1.
        clip: the largest L2 norm that a bucket of a shard's gradient may have, a sum over its samples; a larger one
            is scaled down to it before it is added. None: as it comes.
        warm_up: steps in which the density falls from 1/4 by a factor of 4 at a time, each for equally long, until
            ``density`` is reached.

    Raises:
        ConfigurationError: one of them is out of its range.
    """

    density: float = 0.001
    momentum: float = 0.9
    clip: float | None = None
    warm_up: int = 0

    def __post_init__(self) -> None:
        check_density("DGC", self.density)
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(f"DGC(momentum={self.momentum}): from 0, below 1")
        if self.clip is not None and not 0 < self.clip < math.inf:
            raise ConfigurationError(f"DGC(clip={self.clip}): above 0, or None")
        if not 0 <= self.warm_up <= _MOST_STEPS:
            raise ConfigurationError(f"DGC(warm_up={self.warm_up}): from 0 to {int(_MOST_STEPS):,} steps")

    @property
    def name(self) -> str:
        clip = "no clip" if self.clip is None else f"clip {float(self.clip)!r}"
        return f"dgc/{float(self.density)!r}/momentum {float(self.momentum)!r}/{clip}/warm-up {self.warm_up}"

    def density_at(self, step: int) -> float:
        """The density of the contribution after ``step`` earlier ones."""
        above: list[float] = []
        while 0.25 ** (len(above) + 1) > self.density:
            above.append(0.25 ** (len(above) + 1))
        if step >= self.warm_up or not above:
            return self.density
        return above[step * len(above) // self.warm_up]

    def memory(self, bucket: Bucket) -> Memory:
        """``velocity`` and ``accumulation`` of each value, and ``steps``: how many contributions were made."""
        return {
            "velocity": np.zeros(bucket.size, np.float32),
            "accumulation": np.zeros(bucket.size, np.float32),
            "steps": np.zeros(1, np.float32),
        }

    def compress(self, values: Values, key: int, bucket: Bucket, memory: Memory | None = None) -> bytes:
        velocity = remembered(memory, "velocity", values.size)
        accumulation = remembered(memory, "accumulation", values.size)
        steps = remembered(memory, "steps", 1)
        velocity *= np.float32(self.momentum)
        add_bounded(velocity, self._clipped(values))
        add_bounded(accumulation, velocity)
        indices = find_largest(accumulation, how_many(self.density_at(int(steps[0])), values.size))
        data, sent = pack_sparse(METHOD, accumulation, indices)
        accumulation[indices] -= sent
        velocity[indices] = 0
        np.minimum(steps + np.float32(1), _MOST_STEPS, out=steps)
        return data

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None:
        unpack_sparse(data, METHOD, values)

    def _clipped(self, values: Values) -> Values:
        if self.clip is None:
            return values
        norm = math.sqrt(sum_in_order(np.square(values, dtype=np.float64)))
        return values if norm <= self.clip else values * np.float32(self.clip / norm)
