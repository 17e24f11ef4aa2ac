"""What a compression of gradients is.

It works on one bucket of the gradient at a time. A compressed bucket is a fixed head and what the method puts behind
it; the head names the method, so that a master and a worker that do not agree find out instead of computing
nonsense::

    byte 0      method
    bytes 1-3   the method's own
    bytes 4-11  number of values
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from taskmesh.errors import DecodeError
from taskmesh.training.buckets import Bucket

Values = npt.NDArray[np.float32]
HEAD = struct.Struct("<B3sQ")


class Compression(Protocol):
    """Turns a bucket's values into bytes and back.

    ``compress`` gets finite fp32 values of shape (bucket.size,) and a key of 128 bits; the same values and key give the
    same bytes on every machine. ``decompress`` writes all of ``values``, or raises DecodeError.
    """

    @property
    def name(self) -> str:
        """The method and its settings: what a master and its workers agree on."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the values as they are."""
        ...

    @property
    def takes_whole_parameters(self) -> bool:
        """Whether a bucket must not be a part of a parameter."""
        ...

    def compress(self, values: Values, key: int, bucket: Bucket) -> bytes | memoryview: ...

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None: ...


def open_head(data: bytes | memoryview, method: int, count: int) -> bytes:
    """See that the head is the method's and names so many values; returns the method's own bytes.

    Raises:
        DecodeError: it does not.
    """
    if len(data) < HEAD.size:
        raise DecodeError(f"a gradient of {len(data)} bytes has no head")
    found_method, own, found_count = HEAD.unpack_from(data)
    if found_method != method:
        raise DecodeError(f"a gradient compressed by method {found_method}; this side expects {method}")
    if found_count != count:
        raise DecodeError(f"a gradient of {found_count} values; this side expects {count}")
    return bytes(own)


def view_values(data: bytes | memoryview, dtype: Any, start: int, count: int) -> npt.NDArray[Any]:
    """``count`` elements from byte ``start``, without a copy.

    Raises:
        DecodeError: they are not there.
    """
    wanted = np.dtype(dtype)
    if len(data) < start + count * wanted.itemsize:
        raise DecodeError(f"a gradient of {len(data)} bytes is cut short")
    return np.frombuffer(data, wanted, count, start)
