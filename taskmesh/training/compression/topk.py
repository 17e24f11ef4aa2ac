"""Top-K: the largest values of a bucket now, the others when they have grown.

What is not sent, and what fp16 rounds off what is, stays in the shard's memory and is added to its next gradient, so
that in the end everything arrives (Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", 2018; Aji and Heafield,
"Sparse communication for distributed gradient descent", 2017). Without that memory most of the gradient is lost for
good, and low densities do not converge.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression, Memory, Values, add_bounded, remembered
from taskmesh.training.compression.sparse import (
    check_density,
    find_largest,
    how_many,
    pack_sparse,
    unpack_sparse,
)

METHOD = 4


@dataclass(frozen=True, slots=True)
class TopK(Compression):
    """The values of largest magnitude, as fp16 under one scale a bucket, with their indices.

    Attributes:
        density: the share of each bucket's values that is sent, above 0, at most 1.
        feedback: whether what was not sent is remembered and sent later.

    Raises:
        ConfigurationError: the density is none.
    """

    density: float = 0.01
    feedback: bool = True

    def __post_init__(self) -> None:
        check_density("TopK", self.density)

    @property
    def name(self) -> str:
        return f"topk/{float(self.density)!r}" + ("" if self.feedback else "/no feedback")

    def memory(self, bucket: Bucket) -> Memory:
        """``residual``: the sum of what was not sent."""
        return {"residual": np.zeros(bucket.size, np.float32)} if self.feedback else {}

    def compress(self, values: Values, key: int, bucket: Bucket, memory: Memory | None = None) -> bytes:
        kept = how_many(self.density, values.size)
        if not self.feedback:
            return pack_sparse(METHOD, values, find_largest(values, kept))[0]
        residual = remembered(memory, "residual", values.size)
        add_bounded(residual, values)
        indices = find_largest(residual, kept)
        data, sent = pack_sparse(METHOD, residual, indices)
        residual[indices] -= sent
        return data

    def decompress(self, data: bytes | memoryview, values: Values, bucket: Bucket) -> None:
        unpack_sparse(data, METHOD, values)
