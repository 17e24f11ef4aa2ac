"""What the tests of compressions share."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from taskmesh.training import DGC, Compression, Half, Int8, LowRank, NoCompression, TopK
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression import Memory

COMPRESSIONS: tuple[Compression, ...] = (
    NoCompression(),
    Half("fp16"),
    Half("bf16"),
    Int8(),
    TopK(0.5),
    TopK(0.1),
    TopK(0.01),
    TopK(0.001),
    TopK(0.1, feedback=False),
    DGC(0.01, warm_up=10, clip=100.0),
    LowRank(1),
    LowRank(4),
)
STATEFUL = tuple(each for each in COMPRESSIONS if each.memory(Bucket(0, 1)))


def bucket_of(size: int) -> Bucket:
    """One bucket of so many values; where they make up a matrix and a vector, it says so."""
    rows = int(size**0.5)
    if rows < 2:
        return Bucket(0, size)
    return Bucket(0, size, ((rows, rows), (size - rows * rows,)))


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def exact(count: int, seed: int = 0) -> np.ndarray:
    """Values that no library rounds: whole numbers over powers of two, of many magnitudes."""
    at = np.arange(count, dtype=np.int64) + 1
    return (((at * 2_654_435_761 + seed * 977) % 65_521 - 32_760) / 2.0 ** (at % 23)).astype(np.float32)


@dataclass
class Link:
    """A bucket's way from one shard to the master, and what the shard remembers."""

    compression: Compression
    bucket: Bucket
    memory: Memory = field(init=False)
    sent_bytes: int = 0
    key: int = 0

    def __post_init__(self) -> None:
        self.memory = self.compression.memory(self.bucket)

    def pack(self, values: np.ndarray) -> bytes:
        self.key += 1
        before = values.tobytes()
        data = bytes(self.compression.compress(values, self.key, self.bucket, self.memory))
        assert values.tobytes() == before, "what is given is left as it is"
        self.sent_bytes += len(data)
        return data

    def unpack(self, data: bytes) -> np.ndarray:
        values = np.full(self.bucket.size, np.nan, np.float32)
        self.compression.decompress(data, values, self.bucket)
        return values

    def send(self, values: np.ndarray) -> np.ndarray:
        """What arrives of it."""
        return self.unpack(self.pack(values))


def final_loss(compression: Compression | None, steps: int = 150, rate: float = 1.0) -> float:
    """The loss after so many steps of softmax regression on made-up data: 1,000 weights, 4 shards, plain descent."""
    draw = np.random.default_rng(3)
    inputs = draw.standard_normal((400, 100))
    targets = np.argmax(inputs @ draw.standard_normal((100, 10)), axis=1)
    weights, loss = np.zeros((100, 10)), 0.0
    links = [Link(compression, Bucket(0, 1000, ((100, 10),))) for _ in range(4)] if compression else []
    for _ in range(steps):
        total, loss = np.zeros(1000), 0.0
        for shard in range(4):
            odds = np.exp(inputs[shard::4] @ weights)
            odds /= odds.sum(axis=1, keepdims=True)
            right = np.arange(100), targets[shard::4]
            loss -= float(np.log(odds[right]).sum()) / 400
            odds[right] -= 1
            gradient = (inputs[shard::4].T @ odds).astype(np.float32).reshape(-1)
            total += links[shard].send(gradient) if links else gradient
        weights -= rate / 400 * total.reshape(weights.shape)
    return loss
