"""Which of a bucket's values are sent: rising indices as bytes, in the smallest of three codings.

=======  ==============================================================  ==================  =======================
coding   what is there                                                   bytes for k of n    smallest at a density
=======  ==============================================================  ==================  =======================
bitmap   a bit a value, the lowest first                                 n / 8               above 1/8
blocks   for each 65,536 values a count (uint32); uint16 places in them  2 k + 4 n / 65,536  below about 0.27%
deltas   the number of values passed over before each one that is sent;  k to 2 k            between the two
         a byte 255 passes over 255 and goes on with the next byte
=======  ==============================================================  ==================  =======================
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from taskmesh.errors import DecodeError
from taskmesh.training.compression.base import view_values

Indices = npt.NDArray[np.int64]
BITMAP, BLOCKS, DELTAS = range(3)
_BLOCK = 65_536
_ESCAPE = 255


def pack_indices(indices: Indices, size: int) -> tuple[int, bytes]:
    """Indices below ``size``, rising: their coding, and their bytes in it."""
    gaps = np.diff(indices, prepend=-1) - 1
    lengths = {
        BITMAP: -(-size // 8),
        BLOCKS: 4 * _blocks(size) + 2 * indices.size,
        DELTAS: indices.size + int((gaps // _ESCAPE).sum()),
    }
    coding = min(lengths, key=lambda one: (lengths[one], one))
    if coding == BITMAP:
        return coding, _to_bitmap(indices, size)
    if coding == BLOCKS:
        return coding, _to_blocks(indices, size)
    return coding, _to_deltas(gaps)


def unpack_indices(coding: int, data: bytes | memoryview, kept: int, size: int) -> Indices:
    """``kept`` indices below ``size``, rising.

    Raises:
        DecodeError: these bytes are none.
    """
    readers = {BITMAP: _from_bitmap, BLOCKS: _from_blocks, DELTAS: _from_deltas}
    if coding not in readers:
        raise DecodeError(f"a gradient whose indices are in coding {coding}")
    indices = readers[coding](data, kept, size)
    if indices.size != kept or (kept and indices[-1] >= size):
        raise DecodeError(f"a gradient whose indices are not {kept} below {size}")
    return indices


def _blocks(size: int) -> int:
    return -(-size // _BLOCK)


def _to_bitmap(indices: Indices, size: int) -> bytes:
    marks = np.zeros(size, np.bool_)
    marks[indices] = True
    return np.packbits(marks, bitorder="little").tobytes()


def _from_bitmap(data: bytes | memoryview, kept: int, size: int) -> Indices:
    _expect(data, -(-size // 8))
    return np.flatnonzero(np.unpackbits(view_values(data, np.uint8, 0, len(data)), bitorder="little"))


def _to_blocks(indices: Indices, size: int) -> bytes:
    counts = np.bincount(indices // _BLOCK, minlength=_blocks(size)).astype("<u4")
    return counts.tobytes() + (indices % _BLOCK).astype("<u2").tobytes()


def _from_blocks(data: bytes | memoryview, kept: int, size: int) -> Indices:
    blocks = _blocks(size)
    _expect(data, 4 * blocks + 2 * kept)
    counts = view_values(data, "<u4", 0, blocks).astype(np.int64)
    if counts.sum() != kept:
        raise DecodeError("a gradient whose indices are not as many as their blocks hold")
    indices: Indices = np.repeat(np.arange(blocks) * _BLOCK, counts) + view_values(
        data, "<u2", 4 * blocks, kept
    )
    if (np.diff(indices) <= 0).any():
        raise DecodeError("a gradient whose indices do not rise")
    return indices


def _to_deltas(gaps: Indices) -> bytes:
    escapes, rest = np.divmod(gaps, _ESCAPE)
    ends = np.cumsum(escapes + 1) - 1
    coded = np.full(int(ends[-1]) + 1 if ends.size else 0, _ESCAPE, np.uint8)
    coded[ends] = rest
    return coded.tobytes()


def _from_deltas(data: bytes | memoryview, kept: int, size: int) -> Indices:
    if len(data) > kept + size // _ESCAPE:
        raise DecodeError(f"a gradient with {len(data)} bytes of deltas for {kept} of {size} values")
    coded = view_values(data, np.uint8, 0, len(data))
    is_end = coded != _ESCAPE
    if coded.size and not is_end[-1]:
        raise DecodeError("a gradient whose last delta is cut short")
    places: Indices = np.cumsum(coded + is_end.astype(np.int64))[is_end] - 1
    return places


def _expect(data: bytes | memoryview, size_bytes: int) -> None:
    if len(data) != size_bytes:
        raise DecodeError(f"a gradient with {len(data)} bytes of indices, not {size_bytes}")
