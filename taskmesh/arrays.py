"""numpy arrays on the wire: raw bytes with dtype and shape, never pickle.

One value is::

    byte 0       format (1)
    byte 1       "a" an array, "s" a numpy scalar
    byte 2       length of the dtype's name
    byte 3       number of dimensions
    then         the dtype's name, ASCII ("<f4", "bfloat16", ...)
    then         the dimensions, 8 bytes each, little-endian
    then         the elements, in C order

The head is shared with ``taskmesh.tensors``. All lengths are checked before anything is viewed.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from taskmesh import codec
from taskmesh.errors import DecodeError

CODE = 32
MAX_DIMENSIONS = 32
_FORMAT = 1
_FIXED = struct.Struct("<BcBB")
_ARRAY, _SCALAR = b"a", b"s"
_KINDS = "biufcmM"  # bool, integers, floats, complex, times: kinds whose bytes are their value
# What ``dtype.str`` writes for these kinds. numpy's own parser takes whole expressions.
_DTYPE = re.compile(rf"[<>|=]?([{_KINDS}]\d{{1,2}}|\?)(\[\d{{0,9}}[A-Za-z]{{1,7}}\])?")


def pack_head(kind: bytes, dtype: str, shape: Sequence[int]) -> bytes:
    """The head of one value; ``kind`` is ``b"a"`` or ``b"s"``."""
    name = dtype.encode("ascii")
    return _FIXED.pack(_FORMAT, kind, len(name), len(shape)) + name + struct.pack(f"<{len(shape)}Q", *shape)


def unpack_head(data: bytes | memoryview) -> tuple[bytes, str, tuple[int, ...], int]:
    """Kind, dtype's name, shape, and where the elements begin.

    Raises:
        DecodeError: the head is cut short or of another format.
    """
    if len(data) < _FIXED.size:
        raise DecodeError(f"an array of {len(data)} bytes has no head")
    version, kind, name_length, dimensions = _FIXED.unpack_from(data)
    if version != _FORMAT or dimensions > MAX_DIMENSIONS or kind not in (_ARRAY, _SCALAR):
        raise DecodeError(f"an array's head of format {version}, kind {kind!r}, {dimensions} dimensions")
    shape_at = _FIXED.size + name_length
    start = shape_at + 8 * dimensions
    if len(data) < start:
        raise DecodeError(f"an array's head of {start} bytes is cut short at {len(data)}")
    try:
        name = bytes(data[_FIXED.size : shape_at]).decode("ascii")
    except UnicodeDecodeError:
        raise DecodeError("an array's dtype is damaged") from None
    return kind, name, struct.unpack_from(f"<{dimensions}Q", data, shape_at), start


def check_length(found: int, shape: Sequence[int], item_bytes: int) -> int:
    """The number of elements of that shape.

    Raises:
        DecodeError: ``found`` bytes are not as many as they take.
    """
    count = math.prod(shape)
    if found != count * item_bytes:
        raise DecodeError(
            f"an array of shape {tuple(shape)} takes {count * item_bytes} bytes; there are {found}"
        )
    return count


def encode(value: np.ndarray[Any, Any] | np.generic) -> bytes:
    """An array's (or numpy scalar's) bytes.

    Raises:
        TypeError: its elements are objects or records, which do not travel as raw bytes.
    """
    if value.dtype.kind not in _KINDS:
        raise TypeError(
            f"a numpy array of dtype {value.dtype} cannot travel: only numbers, booleans and times do"
        )
    kind = _ARRAY if isinstance(value, np.ndarray) else _SCALAR
    return pack_head(kind, value.dtype.str, value.shape) + value.tobytes()


def decode(data: bytes) -> np.ndarray[Any, Any] | np.generic:
    """The array again: writable, aligned, its own memory.

    Raises:
        DecodeError: the bytes are not an array's.
    """
    kind, name, shape, start = unpack_head(data)
    if not _DTYPE.fullmatch(name):
        raise DecodeError(f"dtype {name!r} does not travel as raw bytes")
    try:
        dtype = np.dtype(name)
    except (TypeError, ValueError):
        raise DecodeError(f"no numpy dtype {name!r}") from None
    count = check_length(len(data) - start, shape, dtype.itemsize)
    try:
        array = np.frombuffer(data, dtype, count, start).reshape(shape).copy()
    except (ValueError, OverflowError):  # an empty array of a size that no array can have
        raise DecodeError(f"no array has the shape {shape}") from None
    return array if kind == _ARRAY else array[()]


def register() -> None:
    """Let numpy's arrays and scalars travel (entry point ``numpy`` of the group ``taskmesh.wire_types``)."""
    for cls in (np.generic, np.ndarray):
        codec.register(codec.WireType(CODE, cls, encode, decode))
