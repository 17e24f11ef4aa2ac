"""Low rank: each matrix of the gradient as a product of two thin ones.

After Vogels, Karimireddy, Jaggi, "PowerSGD: practical low-rank gradient compression for distributed optimization"
(2019): one power iteration a step, which starts from the right factor of the step before, and error feedback. There
the factors are averaged over all workers twice a step; here each shard sends the factors of its own gradient, once,
and the master adds the products. The sum over the shards is then closer to the true one than one product of that rank.

A parameter of more than two dimensions is a matrix with its first dimension as rows. Vectors, and matrices whose
factors would take more than half of their bytes, travel as fp32. Magnitudes above 2**64 count as that.

After the head, whose own bytes are the rank (uint16), come the parameters that travel as they are; then for each
matrix the exponent of each term (int16); then for each matrix the left and the right factor, term by term (int16).
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import (
    HEAD,
    Compression,
    Memory,
    Values,
    add_bounded,
    open_head,
    remembered,
    view_values,
)
from taskmesh.training.compression.chance import uniform
from taskmesh.training.compression.factors import FACTOR_BITS, Factors, expand, factor

METHOD = 6
_OWN = struct.Struct("<Hx")
_MOST = np.float32(2.0**64)
_MOST_SCALE = 64  # with it, 256 terms of the largest factors stay below fp32's largest number
_MOST_RANK = 256


class _Matrix(NamedTuple):
    """Where a matrix lies in its bucket, and its shape."""

    place: slice
    rows: int
    columns: int


class _Cut(NamedTuple):
    """What a bucket holds: places of what travels as it is, and matrices."""

    plain: tuple[slice, ...]
    matrices: tuple[_Matrix, ...]

    @property
    def plain_values(self) -> int:
        return sum(place.stop - place.start for place in self.plain)

    @property
    def rows(self) -> int:
        return sum(matrix.rows for matrix in self.matrices)

    @property
    def columns(self) -> int:
        return sum(matrix.columns for matrix in self.matrices)


@functools.lru_cache(maxsize=4096)
def _cut(bucket: Bucket, rank: int) -> _Cut:
    plain: list[slice] = []
    matrices: list[_Matrix] = []
    start = 0
    for shape in bucket.shapes or ((bucket.size,),):
        size = math.prod(shape)
        place = slice(start, start + size)
        rows = shape[0] if len(shape) > 1 else 0
        columns = size // rows if rows else 0
        if rows and rank * (rows + columns) <= size:  # int16 for fp32: half of the bytes, or less
            matrices.append(_Matrix(place, rows, columns))
        else:
            plain.append(place)
        start += size
    if start != bucket.size:
        raise ValueError(f"a bucket of {bucket.size} values whose parameters have {start}")
    return _Cut(tuple(plain), tuple(matrices))


@dataclass(frozen=True, slots=True)
class LowRank(Compression):
    """Matrices as sums of ``rank`` products of two vectors; what that leaves out is remembered and sent later.

    Attributes:
        rank: from 1 to 256.

    Raises:
        ConfigurationError: the rank is none.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= _MOST_RANK:
            raise ConfigurationError(f"LowRank(rank={self.rank}): from 1 to {_MOST_RANK}")

    @property
    def name(self) -> str:
        return f"lowrank/{self.rank}"

    @property
    def takes_whole_parameters(self) -> bool:
        return True

    def memory(self, bucket: Bucket) -> Memory:
        """``error``: the sum of what was not sent; ``directions``: the right factors, at first by chance."""
        count = self.rank * _cut(bucket, self.rank).columns
        return {
            "error": np.zeros(bucket.size, np.float32),
            "directions": uniform(bucket.start, count) - np.float32(0.5),
        }

    def compress(self, values: Values, key: int, bucket: Bucket, memory: Memory | None = None) -> bytes:
        cut = _cut(bucket, self.rank)
        error = remembered(memory, "error", values.size)
        directions = remembered(memory, "directions", self.rank * cut.columns)
        add_bounded(error, values, _MOST)
        plain = [_take(error[place]) for place in cut.plain]
        found: list[Factors] = []
        at = 0
        for matrix in cut.matrices:
            rest = error[matrix.place].reshape(matrix.rows, matrix.columns)
            ahead = directions[at : at + self.rank * matrix.columns].reshape(self.rank, matrix.columns)
            found.append(factor(rest, ahead))
            _take_off(rest, found[-1])
            _look_ahead(ahead, found[-1], (key + at) % 2**128)
            at += ahead.size
        head = HEAD.pack(METHOD, _OWN.pack(self.rank), values.size)
        return b"".join((head, *plain, *_to_bytes(found)))

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None:
        if _OWN.unpack(open_head(data, METHOD, values.size))[0] != self.rank:
            raise DecodeError(f"a gradient of another rank than {self.rank}")
        cut = _cut(bucket, self.rank)
        numbers = self.rank * (len(cut.matrices) + cut.rows + cut.columns)
        middle = HEAD.size + 4 * cut.plain_values
        if len(data) != middle + 2 * numbers:
            raise DecodeError(f"a gradient of {values.size} values at rank {self.rank} in {len(data)} bytes")
        _put_plain(view_values(data, "<f4", HEAD.size, cut.plain_values), values, cut)
        self._put_matrices(view_values(data, "<i2", middle, numbers), values, cut)

    def _put_matrices(self, numbers: npt.NDArray[Any], values: Values, cut: _Cut) -> None:
        at = self.rank * len(cut.matrices)
        scales = numbers[:at].astype(np.int32).reshape(-1, self.rank)
        if (scales > _MOST_SCALE).any():
            raise DecodeError("a gradient under a scale that is too large")
        for matrix, own in zip(cut.matrices, scales, strict=True):
            middle = at + self.rank * matrix.rows
            end = middle + self.rank * matrix.columns
            left = numbers[at:middle].reshape(self.rank, matrix.rows)
            right = numbers[middle:end].reshape(self.rank, matrix.columns)
            expand(Factors(left, right, own), values[matrix.place].reshape(matrix.rows, matrix.columns))
            at = end


def _take(error: Values) -> bytes:
    """What travels as it is: all of it, so that nothing is left."""
    data = error.astype("<f4").tobytes()
    error.fill(0)
    return data


def _put_plain(plain: npt.NDArray[Any], values: Values, cut: _Cut) -> None:
    if not np.isfinite(plain).all():
        raise DecodeError("a gradient with values that are not finite")
    at = 0
    for place in cut.plain:
        end = at + place.stop - place.start
        values[place] = plain[at:end]
        at = end


def _take_off(rest: Values, factors: Factors) -> None:
    sent = np.empty_like(rest)
    expand(factors, sent)
    rest -= sent


def _look_ahead(directions: Values, factors: Factors, key: int) -> None:
    """Begin the next step from these right factors, and anew where one is empty: from nothing comes nothing."""
    np.multiply(factors.right, np.float32(2.0**-FACTOR_BITS), out=directions)
    empty = ~factors.right.any(axis=1)
    if empty.any():
        fresh = uniform(key, directions.size).reshape(directions.shape) - np.float32(0.5)
        directions[empty] = fresh[empty]


def _to_bytes(found: list[Factors]) -> list[bytes]:
    scales = [each.scales.astype("<i2").tobytes() for each in found]
    return scales + [side.astype("<i2").tobytes() for each in found for side in (each.left, each.right)]
