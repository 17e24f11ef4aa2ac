"""Sums in double precision whose bits do not depend on the machine.

Libraries add in the order that suits the processor's registers, and a BLAS in one that suits its caches and threads
too. Two ways around it: to add by halves, element by element, in an order that is written down here; and to multiply
matrices of whole numbers so small that no sum is rounded, so that any order gives the same.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]
EXACT_BITS = 53


def fold(rows: Doubles) -> Doubles:
    """The sum over the first axis: the second half onto the first, until one row is left."""
    while len(rows) > 1:
        half = (len(rows) + 1) // 2
        folded = rows[:half].copy()
        folded[: len(rows) - half] += rows[half:]
        rows = folded
    return rows[0] if len(rows) else np.zeros(rows.shape[1:])


def sum_in_order(values: Doubles) -> float:
    """The sum of a vector."""
    return float(fold(values))


def orthonormalise(columns: Doubles, *, least: float = 1e-4) -> None:
    """Make columns orthonormal in place, from the first to the last (modified Gram-Schmidt).

    A column of which no more than ``least`` of its length is left when the ones before are taken off becomes zero:
    what is left of it is rounding.
    """
    before = np.sqrt(fold(columns * columns))
    for place in range(columns.shape[1]):
        column = columns[:, place]
        norm = np.sqrt(fold(column * column))
        if norm <= least * before[place]:
            column[:] = 0
            continue
        column /= norm
        later = columns[:, place + 1 :]
        later -= column[:, None] * fold(column[:, None] * later)
