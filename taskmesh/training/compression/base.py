"""What a compression of gradients is.

It works on one bucket of the gradient at a time. A compressed bucket is a fixed head and what the method puts behind
it; the head names the method, so that a master and a worker that do not agree find out instead of computing
nonsense. Every number in it is little-endian::

    byte 0      method
    bytes 1-3   the method's own
    bytes 4-11  number of values

Some methods send only a part of what they are given and remember the rest. That memory belongs to one bucket of one
logical shard; whoever calls keeps it, and keeps it only when what was sent has entered a version.
"""

from __future__ import annotations

import struct
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from taskmesh.errors import DecodeError
from taskmesh.training.buckets import Bucket

Values = npt.NDArray[np.float32]
Memory = dict[str, Values]
HEAD = struct.Struct("<B3sQ")
LARGEST = np.finfo(np.float32).max


class Compression(Protocol):
    """Turns a bucket's values into bytes and back.

    The same values, key and memory give the same bytes on every machine, and the same bytes give the same values: each
    rounded operation has a fixed place in a fixed order.
    """

    @property
    def name(self) -> str:
        """The method and its settings: what a master and its workers agree on."""
        ...

    @property
    def is_plain(self) -> bool:
        """Whether the bytes are the values as they are."""
        return False

    @property
    def takes_whole_parameters(self) -> bool:
        """Whether a bucket must not be a part of a parameter."""
        return False

    def memory(self, bucket: Bucket) -> Memory:
        """What it knows of a bucket before the first step: fp32 arrays by name; none where it remembers nothing."""
        return {}

    def compress(
        self, values: Values, key: int, bucket: Bucket, memory: Memory | None = None
    ) -> bytes | memoryview:
        """A bucket's values as bytes.

        Args:
            values: finite, shape (bucket.size,); they are left as they are.
            key: 128 bits, from which chance is drawn where the method needs any.
            memory: that of ``memory(bucket)`` or of an earlier call. It is changed in place to what it is once these
                bytes have entered a version.

        Raises:
            ValueError: the method remembers something, and ``memory`` is not a memory of this bucket.
        """
        ...

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None:
        """Write all of ``values``. They are finite, except that a plain method writes whatever is there.

        Raises:
            DecodeError: the bytes are damaged, or another method's, or made with other settings.
        """
        ...


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


def remembered(memory: Memory | None, name: str, size: int) -> Values:
    """One array of a memory, to be changed in place.

    Raises:
        ValueError: it is not there, or of another size.
    """
    if memory is None:
        raise ValueError("this compression needs the bucket's memory")
    found = memory.get(name)
    if found is None or found.shape != (size,) or found.dtype != np.float32:
        raise ValueError(f"the memory holds no {name!r} of {size} fp32 values: it is another bucket's")
    return found


def add_bounded(total: Values, values: Values, most: np.float32 = LARGEST) -> None:
    """Add in place; a sum of a larger magnitude than ``most``, by default the largest of fp32, becomes that."""
    with np.errstate(over="ignore"):
        total += values
    np.clip(total, -most, most, out=total)


def exponent_of(values: Values) -> int:
    """The least ``e`` with all magnitudes below 2**e; 0 where all are zero or there are none."""
    if not values.size:
        return 0
    return int(np.frexp(max(values.max(), -values.min()))[1])
