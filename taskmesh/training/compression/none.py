"""No compression: fp32 as it is."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taskmesh.errors import DecodeError
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression, Memory, Values


@dataclass(frozen=True, slots=True)
class NoCompression(Compression):
    """Gradients travel as fp32: the values alone, 4 bytes each."""

    @property
    def name(self) -> str:
        return "none"

    @property
    def is_plain(self) -> bool:
        return True

    def compress(self, values: Values, key: int, bucket: Bucket, memory: Memory | None = None) -> memoryview:
        return values.view(np.uint8).data

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None:
        if len(data) != values.nbytes:
            raise DecodeError(f"a gradient of {values.size} fp32 values in {len(data)} bytes")
        found = np.frombuffer(data, np.float32)
        if found.__array_interface__["data"] != values.__array_interface__["data"]:
            values[:] = found
