"""What lies where in a checkpoint's large parts.

A checkpoint has four parts, and one for each shard whose compression remembers something::

    parameters  the model's flat buffer, as it is
    tensors     the optimizer's tensors, and all others of its state, one behind the other without a gap
    state       everything else that the next steps depend on, as msgpack, with nothing in the tensors' places
    index       JSON: name, type, shape and place of each tensor in the first two
    memory.3    what the compression of shard 3 remembers: fp32 values, bucket after bucket

so that anybody can take one apart who knows neither the model nor torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import msgspec

from taskmesh.errors import CheckpointError

MEMORY = "memory."


class Type(NamedTuple):
    """How values of one type are stored."""

    code: str
    size_bytes: int


TYPES = {
    "float64": Type("F64", 8),
    "int64": Type("I64", 8),
    "complex64": Type("C64", 8),
    "float32": Type("F32", 4),
    "int32": Type("I32", 4),
    "float16": Type("F16", 2),
    "bfloat16": Type("BF16", 2),
    "int16": Type("I16", 2),
    "int8": Type("I8", 1),
    "uint8": Type("U8", 1),
    "bool": Type("BOOL", 1),
}


class Entry(msgspec.Struct, frozen=True):
    """One tensor in a part.

    Attributes:
        path: keys and places that lead to it in the state; of a parameter or buffer, its name.
        at: its first byte within the part.
        array: it is numpy's, not torch's.
    """

    path: tuple[str | int, ...]
    dtype: str
    shape: tuple[int, ...]
    at: int
    array: bool = False

    @property
    def name(self) -> str:
        return "/".join(map(str, self.path))

    @property
    def count(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        return self.count * TYPES[self.dtype].size_bytes


class Index(msgspec.Struct, frozen=True):
    """The tensors of a checkpoint's large parts, in the order in which they lie there."""

    parameters: tuple[Entry, ...]
    tensors: tuple[Entry, ...]


T = TypeVar("T")


def memory_name(shard: int) -> str:
    """The part with what the compression of a shard remembers."""
    return f"{MEMORY}{shard}"


def memories_of(parts: Mapping[str, T]) -> dict[int, T]:
    """Those parts, by shard."""
    names = [name.removeprefix(MEMORY) for name in parts if name.startswith(MEMORY)]
    return {shard: parts[memory_name(shard)] for shard in sorted(map(int, filter(str.isdecimal, names)))}


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Index).decode


def encode_index(index: Index) -> bytes:
    return _encode(index)


def decode_index(data: bytes | memoryview, parameter_bytes: int, tensor_bytes: int) -> Index:
    """Read an index.

    Args:
        parameter_bytes, tensor_bytes: of the parts that it is about.

    Raises:
        CheckpointError: the bytes are not one, or it names bytes that the parts do not have.
    """
    try:
        index = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"a checkpoint's index is damaged: {error}") from None
    _check(index.parameters, parameter_bytes)
    _check(index.tensors, tensor_bytes)
    return index


def _check(entries: Sequence[Entry], size_bytes: int) -> None:
    for entry in entries:
        if not entry.path or entry.dtype not in TYPES or any(length < 0 for length in entry.shape):
            raise CheckpointError(f"a checkpoint's index is damaged: {entry.name!r} is no tensor")
        if not 0 <= entry.at <= entry.at + entry.size_bytes <= size_bytes:
            raise CheckpointError(f"a checkpoint's index is damaged: {entry.name!r} lies outside its part")
