"""fp16 values under a common power of two.

fp16 alone reaches from 6e-8 to 65,504, and gradients are often smaller. So values are first multiplied by the power of
two that brings the largest of them just below 2**15. Multiplying by a power of two is exact: what is lost is fp16's
rounding, at most 2**-11 of a value, down to 2**-28 of the largest one; below 2**-39 of it a value may become zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from taskmesh.errors import DecodeError
from taskmesh.training.compression.base import Values, exponent_of

Halves = npt.NDArray[np.float16]
_TOP = 15
_MOST = np.float32(2**_TOP - 16)  # the largest fp16 below 2**15: what is decoded never overflows fp32
_MOST_BITS = int(np.float16(_MOST).view(np.uint16))
_FINEST = 126  # 2**126 and its inverse are normal fp32 numbers
_COARSEST = _TOP - 128


def to_halves(values: Values) -> tuple[int, Halves]:
    """Finite values as fp16 times 2**-scale. Returns the scale's exponent and the halves, little-endian."""
    scale = min(_FINEST, _TOP - exponent_of(values)) if values.size else 0
    scaled = values * np.float32(2.0**scale)
    np.clip(scaled, -_MOST, _MOST, out=scaled)
    return scale, scaled.astype("<f2")


def from_halves(scale: int, halves: npt.NDArray[Any], out: Values | None = None) -> Values:
    """The values again, all of them finite.

    Raises:
        DecodeError: ``to_halves`` makes no such scale or halves.
    """
    if not _COARSEST <= scale <= _FINEST:
        raise DecodeError(f"a gradient under a scale of 2**{scale}")
    bits = halves.view("<u2")
    if ((bits & 0x7FFF) > _MOST_BITS).any():
        raise DecodeError("a gradient with fp16 values beyond their scale")
    return np.multiply(halves.astype(np.float32), np.float32(2.0**-scale), out=out)
