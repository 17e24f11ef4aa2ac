"""A few of a bucket's values, and where they belong: what Top-K and DGC send.

After the head, whose own bytes are the coding of the indices and the exponent of the fp16 scale (int16)::

    4 bytes     number of values that are sent
    2 bytes     each: the values, fp16 under one scale
    the rest    their indices
"""

from __future__ import annotations

import math
import struct

import numpy as np

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training.compression.base import HEAD, Values, open_head, view_values
from taskmesh.training.compression.fp16 import from_halves, to_halves
from taskmesh.training.compression.indices import Indices, pack_indices, unpack_indices

_OWN = struct.Struct("<Bh")
_KEPT = struct.Struct("<I")
_START = HEAD.size + _KEPT.size


def check_density(owner: str, density: float) -> None:
    """Raises ConfigurationError where a density is not above 0 and at most 1."""
    if not 0 < density <= 1:
        raise ConfigurationError(f"{owner}(density={density}): above 0, at most 1")


def how_many(density: float, size: int) -> int:
    """The share of ``size`` values that is sent: at least one where there are any."""
    return min(size, math.ceil(density * size))


def find_largest(values: Values, kept: int) -> Indices:
    """Where the ``kept`` (one at least) values of largest magnitude are, rising; of equal ones the first.

    Zeros are left out.
    """
    magnitudes = np.abs(values)
    if kept >= values.size:
        return np.flatnonzero(magnitudes)
    # Which of equal values a partition puts on which side differs between machines; its bound does not.
    bound = np.partition(magnitudes, values.size - kept)[values.size - kept]
    if bound == 0:
        return np.flatnonzero(magnitudes)
    chosen = magnitudes > bound
    missing = kept - np.count_nonzero(chosen)
    chosen[np.flatnonzero(magnitudes == bound)[:missing]] = True
    return np.flatnonzero(chosen)


def pack_sparse(method: int, values: Values, indices: Indices) -> tuple[bytes, Values]:
    """The values at these indices as bytes, and as they will come out."""
    scale, halves = to_halves(values[indices])
    coding, coded = pack_indices(indices, values.size)
    head = HEAD.pack(method, _OWN.pack(coding, scale), values.size)
    data = b"".join((head, _KEPT.pack(indices.size), halves.tobytes(), coded))
    return data, from_halves(scale, halves)


def unpack_sparse(data: bytes | memoryview, method: int, values: Values) -> None:
    """Write what was sent, and zeros elsewhere.

    Raises:
        DecodeError: these are not the bytes of ``pack_sparse`` for so many values.
    """
    coding, scale = _OWN.unpack(open_head(data, method, values.size))
    if len(data) < _START:
        raise DecodeError(f"a gradient of {len(data)} bytes is cut short")
    kept = _KEPT.unpack_from(data, HEAD.size)[0]
    sent = from_halves(scale, view_values(data, "<f2", _START, kept))
    indices = unpack_indices(coding, memoryview(data)[_START + 2 * kept :], kept, values.size)
    values.fill(0)
    values[indices] = sent
