"""A matrix as a product of two thin ones, to the same bits on every machine.

Whole numbers take the place of real ones wherever a BLAS adds, each under a power of two: the factors get 15 bits, and
the matrix as many (29 at 512 rows) as leave every sum of products within 2**53. None is rounded then, whatever the
order. What the whole numbers leave out, the caller remembers with the rest of the error.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from taskmesh.training.compression.base import Values, exponent_of
from taskmesh.training.compression.sums import EXACT_BITS, Doubles, orthonormalise

Whole = npt.NDArray[np.int16]
FACTOR_BITS = 15
_BLOCK_PRODUCTS = 262_144  # up to here OpenBLAS uses one thread, and waits for no other on a busy machine
_BLOCK_VALUES = 32_768


class Factors(NamedTuple):
    """The matrix is the sum over k of ``left[k]`` times ``right[k]`` times 2**scales[k].

    Attributes:
        left: shape (rank, rows).
        right: shape (rank, columns).
        scales: shape (rank,).
    """

    left: Whole
    right: Whole
    scales: npt.NDArray[np.int32]


def factor(matrix: Values, directions: Values) -> Factors:
    """The best product whose columns on the left span what the matrix makes of ``directions`` (one power iteration).

    Args:
        matrix: shape (rows, columns), magnitudes up to 2**64.
        directions: shape (rank, columns), magnitudes up to 1; those of the step before are a good start.
    """
    scale = EXACT_BITS - FACTOR_BITS - (max(matrix.shape) - 1).bit_length() - exponent_of(matrix)
    onto, _ = _to_whole(directions.astype(np.float64))
    blocks = _blocks(matrix, _BLOCK_PRODUCTS // len(directions))
    left = np.concatenate([_whole_rows(matrix[place], scale) @ onto.T for place in blocks])
    orthonormalise(left)
    left_whole, left_scales = _to_whole(np.ascontiguousarray(left.T))
    right = np.zeros_like(directions, np.float64)
    for place in blocks:
        right += left_whole[:, place] @ _whole_rows(matrix[place], scale)
    right_whole, right_scales = _to_whole(right)
    scales = -(right_scales + scale + 2 * left_scales)
    return Factors(left_whole.astype(np.int16), right_whole.astype(np.int16), scales.astype(np.int32))


def expand(factors: Factors, out: Values) -> None:
    """Write the product, its terms added from the first to the last; ``out`` has shape (rows, columns)."""
    left = np.ascontiguousarray(factors.left.T, np.float32)
    left *= np.float32(2.0**-FACTOR_BITS)  # the right side alone would fall below fp32's normal numbers first
    right = np.ldexp(factors.right.astype(np.float32), factors.scales[:, None] + FACTOR_BITS)
    for place in _blocks(out, _BLOCK_VALUES):
        np.multiply(left[place, :1], right[0], out=out[place])
        for term in range(1, len(right)):
            out[place] += left[place, term : term + 1] * right[term]


def _blocks(matrix: Values, values: int) -> list[slice]:
    """Runs of rows that hold about so many values."""
    step = max(1, values // max(1, matrix.shape[1]))
    return [slice(start, start + step) for start in range(0, len(matrix), step)]


def _whole_rows(rows: Values, scale: int) -> Doubles:
    """Rows times 2**scale as whole numbers."""
    whole = rows * np.float64(2.0**scale)
    return np.rint(whole, out=whole)


def _to_whole(rows: Doubles) -> tuple[Doubles, npt.NDArray[np.int32]]:
    """Each row as whole numbers of 15 bits under a power of two. Returns them and its exponents: row * 2**exponent."""
    exponents = FACTOR_BITS - np.frexp(np.abs(rows).max(axis=1))[1]
    most = 2**FACTOR_BITS - 1
    return np.clip(np.rint(np.ldexp(rows, exponents[:, None])), -most, most), exponents
