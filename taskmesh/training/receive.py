"""One shard's payload on its way in: bucket by bucket into a round's memory, checked, decoded and added.

The threads that move it call in here. What they find wrong is noted; the shard is refused for it when all is there.
"""

from __future__ import annotations

import numpy as np

from taskmesh.checkpoints.manifest import checksum_of
from taskmesh.errors import DecodeError
from taskmesh.tensors import FlatLayout
from taskmesh.training.aggregate import Contribution, Round
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression
from taskmesh.training.orders import ShardResult


class Receipt:
    """What one result brings.

    Attributes:
        fault: why it cannot be used; None as long as it can.
    """

    def __init__(
        self,
        result: ShardResult,
        shard: int,
        round_: Round,
        buckets: tuple[Bucket, ...],
        layout: FlatLayout,
        compression: Compression,
    ) -> None:
        self._result = result
        self._shard = shard
        self._round = round_
        self._buckets = buckets
        self._layout = layout
        self._compression = compression
        self._arrived: dict[int, memoryview] = {}
        self._rest = 4 * (layout.float_count - layout.parameter_count) + 8 * layout.integer_count
        self.fault = self._fault_of_claim()
        if self.fault is None:
            round_.open(shard, Contribution(result.loss_sum, result.count))

    def _fault_of_claim(self) -> str | None:
        result, buckets = self._result, self._buckets
        if result.count < 0 or not np.isfinite(result.loss_sum):
            return f"a loss of {result.loss_sum} over {result.count} samples"
        if len(result.sizes) != len(buckets) + bool(self._rest) or len(result.digests) not in (
            0,
            len(result.sizes),
        ):
            return f"a payload in {len(result.sizes)} pieces; the layout takes {len(buckets)}"
        if self._rest and result.sizes[-1] != self._rest:
            return f"buffers of {result.sizes[-1]} bytes; the layout takes {self._rest}"
        return None

    def take_inline(self) -> None:
        """Take what rides in the result."""
        data, at = memoryview(self._result.inline), 0
        for place, size in enumerate(self._result.sizes):
            into = self.target(place, len(data[at : at + size]))
            if into is not None:
                into.cast("B")[:] = data[at : at + size]
                self.taken(place)
            at += size

    def target(self, place: int, size: int) -> memoryview | None:
        """Where a piece of that size belongs; None where it is not wanted."""
        if self.fault is not None:
            return None
        if size != self._result.sizes[place]:
            self.fault = f"piece {place} of the gradient has {size} bytes, not {self._result.sizes[place]}"
            return None
        if place < len(self._buckets):
            if self._round.has(self._shard, place):
                self._arrived[place] = memoryview(b"")  # from an earlier try
                return None
            if self._compression.is_plain and size == 4 * self._buckets[place].size:
                self._arrived[place] = self._round.memory(self._shard, place).data
                return self._arrived[place]
        self._arrived[place] = memoryview(bytearray(size))
        return self._arrived[place]

    def taken(self, place: int) -> None:
        """A piece is there."""
        data = self._arrived[place].cast("B")
        if self._result.digests and checksum_of(data) != self._result.digests[place]:
            self.fault = f"piece {place} of the gradient is corrupt"
        elif place < len(self._buckets):
            try:
                self._add(place, data)
            except DecodeError as error:
                self.fault = str(error)

    def _add(self, place: int, data: memoryview) -> None:
        values = self._round.memory(self._shard, place)
        self._compression.decompress(data, values, self._buckets[place])
        if not np.isfinite(values).all():
            raise DecodeError("the decoded gradient is not finite")
        self._round.add(self._shard, place)

    def close(self) -> str | None:
        """All that comes is there. Returns why the result cannot be used, if so."""
        if self.fault is None and len(self._arrived) < len(self._result.sizes):
            self.fault = "a piece of the gradient is gone"
        if self.fault is not None:
            return self.fault
        data = self._arrived[len(self._buckets)] if self._rest else memoryview(b"")
        floats = np.frombuffer(data, np.float32, self._layout.float_count - self._layout.parameter_count)
        integers = np.frombuffer(data[4 * floats.size :], np.int64).copy()
        if not np.isfinite(floats).all():
            return "the change of the buffers is not finite"
        self._round.open(
            self._shard, Contribution(self._result.loss_sum, self._result.count, floats, integers)
        )
        return None
