"""No compression: fp32 as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taskmesh.errors import DecodeError
from taskmesh.training.compression.base import HEAD, Values, open_head, view_values

METHOD = 0


@dataclass(frozen=True, slots=True)
class NoCompression:
    """Gradients travel as fp32."""

    @property
    def name(self) -> str:
        return "none"

    def compress(self, values: Values, key: int) -> bytes:
        return HEAD.pack(METHOD, b"", values.size) + values.astype("<f4", copy=False).tobytes()

    def decompress(self, data: bytes | memoryview, count: int) -> Values:
        open_head(data, METHOD, count)
        if len(data) != HEAD.size + 4 * count:
            raise DecodeError(f"a gradient of {count} fp32 values in {len(data)} bytes")
        values: Values = view_values(data, "<f4", HEAD.size, count).astype(np.float32)
        return values
