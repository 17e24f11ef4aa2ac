"""Steps instead of parameters on their way to the workers.

An optimizer that normalises (Adam) changes every parameter a little in every step, so what changes between two versions
is as dense as the parameters. What is sparse, or can be rounded, is the gradient that it steps by. With a compression
of the downlink the master compresses the mean gradient, steps by what is left of it, and sends that; all who hold the
parameters step the same optimizer, and have the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import DecodeError
from taskmesh.tensors import FlatLayout
from taskmesh.training.buckets import cut
from taskmesh.training.compression.base import Compression
from taskmesh.training.memory import State, fresh
from taskmesh.training.seeds import derive
from taskmesh.training.step.aggregate import Update, Values

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Sent:
    """An update as its receivers have it.

    Attributes:
        pieces: the gradient, compressed bucket by bucket, then the float and the integer buffers.
    """

    loss: float
    count: int
    pieces: tuple[bytes | memoryview, ...]


class Step(NamedTuple):
    """What leads from one version to the next.

    Attributes:
        parent: the version that it leads on from.
        previous: what led to that one; None where that is a checkpoint.
        step: the number of the update.
    """

    parent: int
    previous: Part | None
    step: int
    sent: Sent


class _Head(msgspec.Struct, frozen=True, array_like=True):
    parent: int
    previous: Part | None
    step: int
    loss: float
    count: int
    sizes: tuple[int, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Head).decode


def encode(step: Step) -> bytes:
    """A step as it travels."""
    sent = step.sent
    sizes = tuple(memoryview(piece).nbytes for piece in sent.pieces)
    head = _encode(_Head(step.parent, step.previous, step.step, sent.loss, sent.count, sizes))
    return b"".join((_LENGTH.pack(len(head)), head, *sent.pieces))


def decode(data: memoryview) -> Step:
    """Read a step, whose pieces then lie in the data.

    Raises:
        DecodeError: the bytes are damaged.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        at = _LENGTH.size + length
        head = _decode(data[_LENGTH.size : at])
    except (struct.error, msgspec.DecodeError) as error:
        raise DecodeError(f"a step is damaged: {error}") from None
    pieces: list[memoryview] = []
    for size in head.sizes:
        pieces.append(data[at : at + size])
        at += size
    if at != len(data):
        raise DecodeError(f"a step of {len(data)} bytes names {at}")
    return Step(head.parent, head.previous, head.step, Sent(head.loss, head.count, tuple(pieces)))


class Downlink:
    """Compresses a run's updates, and reads them again.

    What the compression remembers is part of the run's state.
    """

    def __init__(self, compression: Compression, layout: FlatLayout, seed: int) -> None:
        self._compression = compression
        self._layout = layout
        self._seed = seed
        self._buckets = cut(layout, whole=compression.takes_whole_parameters)
        self._memory: State = fresh(compression, self._buckets)

    def compress(self, update: Update, step: int) -> Sent:
        """An update as it is sent; its gradient becomes what the receivers read."""
        pieces: list[bytes | memoryview] = []
        for place, bucket in enumerate(self._buckets):
            values = update.gradient[bucket.start : bucket.stop]
            key = derive(self._seed, "downlink", step, place)
            piece = self._compression.compress(values, key, bucket, self._memory[place] or None)
            if self._compression.is_plain:
                piece = bytes(piece)  # the values themselves, in memory that is used again
            self._compression.decompress(piece, values, bucket)
            pieces.append(piece)
        return Sent(update.loss, update.count, (*pieces, update.floats.tobytes(), update.integers.tobytes()))

    def read(self, sent: Sent, gradient: Values) -> Update:
        """The update that was sent, its gradient in memory of the layout's parameters.

        Raises:
            DecodeError: a piece is damaged, or made with another compression.
        """
        *pieces, floats, integers = sent.pieces or (b"", b"")
        layout = self._layout
        sizes = len(pieces), len(floats), len(integers)
        wanted = (
            len(self._buckets),
            4 * (layout.float_count - layout.parameter_count),
            8 * layout.integer_count,
        )
        if sizes != wanted:
            raise DecodeError(f"a step of {sizes[0]} buckets and {sizes[1:]} bytes of buffers; {wanted} fit")
        for bucket, piece in zip(self._buckets, pieces, strict=True):
            self._compression.decompress(piece, gradient[bucket.start : bucket.stop], bucket)
        changes, whole = np.frombuffer(floats, np.float32), np.frombuffer(integers, np.int64)
        return Update(sent.loss, sent.count, gradient, changes, whole.copy())

    def state(self) -> list[Mapping[str, Any]]:
        """What is remembered, by bucket."""
        return [dict(memory) for memory in self._memory]

    def restore(self, state: Sequence[Mapping[str, Any]] | None) -> None:
        """Go back to a state; to the first one where there is none."""
        self._memory = fresh(self._compression, self._buckets)
        for memory, saved in zip(self._memory, state or (), strict=False):
            memory.update({name: np.array(values, np.float32) for name, values in saved.items()})
