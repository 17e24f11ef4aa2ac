"""Half precision: fp16 under a scale for each bucket, or bfloat16.

After the head come the values, 2 bytes each: 50% fewer than fp32. fp16 keeps 11 significant bits of values that are not
far below the bucket's largest (see ``fp16``); the exponent of the scale, an int16, stands in the head. bfloat16 keeps
8 bits over all of fp32's range (Kalamkar et al., "A study of bfloat16 for deep learning training", 2019). Both round
to the nearest, ties to even; bfloat16 holds what would round to infinity at its largest number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import HEAD, Compression, Memory, Values, open_head, view_values
from taskmesh.training.compression.fp16 import from_halves, to_halves

METHOD_FP16 = 2
METHOD_BF16 = 3
_SCALE = struct.Struct("<hx")
_LARGEST_BF16 = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]


@dataclass(frozen=True, slots=True)
class Half(Compression):
    """Two bytes a value: "fp16" or "bf16".

    Raises:
        ConfigurationError: ``kind`` is neither.
    """

    kind: Literal["fp16", "bf16"] = "fp16"

    def __post_init__(self) -> None:
        if self.kind not in ("fp16", "bf16"):
            raise ConfigurationError(f"Half({self.kind!r}): 'fp16' or 'bf16'")

    @property
    def name(self) -> str:
        return self.kind

    def compress(self, values: Values, key: int, bucket: Bucket, memory: Memory | None = None) -> bytes:
        if self.kind == "bf16":
            return HEAD.pack(METHOD_BF16, bytes(3), values.size) + _to_bf16(values).tobytes()
        scale, halves = to_halves(values)
        return HEAD.pack(METHOD_FP16, _SCALE.pack(scale), values.size) + halves.tobytes()

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None:
        is_bf16 = self.kind == "bf16"
        own = open_head(data, METHOD_BF16 if is_bf16 else METHOD_FP16, values.size)
        if len(data) != HEAD.size + 2 * values.size:
            raise DecodeError(f"a gradient of {values.size} {self.kind} values in {len(data)} bytes")
        if is_bf16:
            _from_bf16(view_values(data, "<u2", HEAD.size, values.size), values)
        else:
            from_halves(_SCALE.unpack(own)[0], view_values(data, "<f2", HEAD.size, values.size), values)


def _to_bf16(values: Values) -> npt.NDArray[np.uint16]:
    """The upper halves of the fp32 numbers, rounded to the nearest, ties to even; little-endian."""
    bits = np.clip(values, -_LARGEST_BF16, _LARGEST_BF16).view(np.uint32)
    bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    bits >>= np.uint32(16)
    return bits.astype("<u2")


def _from_bf16(upper: npt.NDArray[Any], values: Values) -> None:
    """Put the upper halves back. Raises DecodeError where one is no finite number."""
    if ((upper & 0x7FFF) > 0x7F7F).any():
        raise DecodeError("a gradient with bf16 values that are not finite")
    values[:] = (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
