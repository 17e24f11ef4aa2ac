"""What a shard sends: its gradient, compressed bucket by bucket as backward finishes them, and its buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from taskmesh.checkpoints.manifest import checksum_of
from taskmesh.tensors import FlatModel
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression, Memory
from taskmesh.training.memory import Held, State, copy, fresh, unpack
from taskmesh.training.seeds import derive

Take = Callable[[int, memoryview], None]


class Sink(Protocol):
    """What a gradient is given to, bucket by bucket.

    Attributes:
        gradient: the flat one that the buckets lie in.
        is_finite: whether all that was added is.
    """

    gradient: npt.NDArray[np.float32]
    is_finite: bool

    def add(self, place: int) -> None:
        """A bucket is complete."""
        ...


class Payload:
    """One shard's.

    Args:
        seed: names the chance that compression draws, beside the bucket.
        take: is given each piece as soon as it is there, by its place; a piece may come again, changed.

    Attributes:
        gradient: the flat gradient.
        is_finite: whether all that was added is.
    """

    def __init__(
        self,
        compression: Compression,
        buckets: Sequence[Bucket],
        gradient: Tensor,
        seed: tuple[str | int, ...],
        state: Held | None,
        take: Take,
    ) -> None:
        self.gradient = gradient.numpy()
        self.is_finite = True
        self._compression = compression
        self._buckets = buckets
        self._seed = seed
        self._take = take
        self._state = _begin(compression, buckets, state)
        self._memory: dict[int, Memory] = {}
        self._pieces: dict[int, memoryview] = {}
        self._digests: dict[int, bytes] = {}

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        return tuple(self._pieces[place] for place in sorted(self._pieces))

    @property
    def memory(self) -> State:
        """What the compression remembers of all its buckets; empty where it remembers nothing."""
        return (
            tuple(self._memory.get(place, {}) for place in range(len(self._buckets))) if self._memory else ()
        )

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(self._digests[place] for place in sorted(self._digests))

    def add(self, place: int) -> None:
        """A bucket is complete."""
        bucket = self._buckets[place]
        values = self.gradient[bucket.start : bucket.stop]
        self.is_finite = self.is_finite and bool(np.isfinite(values).all())
        if self.is_finite:
            memory = copy(self._state[place])  # a bucket may be added again, changed
            key = derive(*self._seed, place)
            compressed = self._compression.compress(values, key, bucket, memory or None)
            if memory:
                self._memory[place] = memory
            self.add_piece(place, memoryview(compressed).cast("B"))

    def add_piece(self, place: int, piece: memoryview) -> None:
        """A piece that is no bucket, behind them."""
        self._pieces[place] = piece
        self._digests[place] = checksum_of(piece)
        self._take(place, piece)


def _begin(compression: Compression, buckets: Sequence[Bucket], state: Held | None) -> State:
    """What a compression goes on from."""
    if isinstance(state, tuple):
        return state
    begun = fresh(compression, buckets)
    return begun if state is None else unpack(state, begun)


def pack_buffers(flat: FlatModel) -> bytes:
    """What the forward pass made of the buffers; the flat buffer keeps those of the version.

    Of float buffers the change: what did not change (a constant, a mask of infinities) then stays as it is, where
    a mean of equal values would be rounded a little further with every step.
    """
    if not flat.layout.floats and not flat.layout.integers:
        return b""
    floats, integers = flat.floats.clone(), flat.integers.clone()
    flat.collect_buffers()
    changes = torch.where(flat.floats == floats, 0.0, flat.floats - floats)
    data: bytes = changes.numpy().tobytes() + flat.integers.numpy().tobytes()
    flat.floats.copy_(floats)
    flat.integers.copy_(integers)
    return data
