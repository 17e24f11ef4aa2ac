"""What a run's master and its workers say to each other about shards."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import TrainingError

GRADIENT_TTL_MS = 600_000  # of what a worker sends, should nobody fetch and remove it


class ShardFailed(TrainingError):
    """A worker could not compute a shard: the model, the loss function or the data raised.

    Attributes:
        worker: whose handler it was.
        reason: what was raised, in words.
    """

    def __init__(self, worker: str, reason: str) -> None:
        super().__init__(worker, reason)
        self.worker = worker
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """What a worker is told to compute.

    Attributes:
        indices: of its samples.
        lengths: how many of them make up each of its batches, in order.
        agreement: what this master and its workers must have alike (``RunSetup.agreement``).
        fingerprint: what a worker's bits must depend on, as the master's do; "" where it does not matter.
        avoid: workers that leave it to others.
        holder: the worker that has what the shard's compression remembers; "" for any.
        memory: the name of what it is to go on from; "" for nothing.
        kept_memory: where a checkpoint has it, for workers that do not.
        update: what leads to these parameters from those before them, where they do not travel themselves.
    """

    version: int
    step: int
    shard: int
    indices: tuple[int, ...]
    lengths: tuple[int, ...]
    parameters: Part
    layout: str
    agreement: str
    fingerprint: str = ""
    avoid: tuple[str, ...] = ()
    holder: str = ""
    memory: str = ""
    kept_memory: Part | None = None
    update: Part | None = None

    def batches(self) -> list[tuple[int, ...]]:
        """The indices of each batch."""
        ends = list(itertools.accumulate(self.lengths))
        return [self.indices[end - length : end] for end, length in zip(ends, self.lengths, strict=True)]


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What came of it.

    The payload is the gradient, compressed bucket by bucket, then the float and the integer buffers, where there are
    any. Small ones ride in the result, large ones lie in chunks, one a piece.

    Attributes:
        status: "computed"; "refused" for a loss or gradient that is not finite; "declined" by a worker that was to
            be avoided; "unlike" from one whose bits would be others; "gone" when the parameters could not be fetched;
            "forgot" when what its compression was to go on from is not there.
        reason: of a refusal, in words; what an unlike worker is; why something is not there.
        sizes: bytes of each piece of the payload.
        digests: of each piece, where they lie in chunks.
        attempt: names the delivery.
        remembers: this worker holds what the shard's compression remembers, under the attempt's name.
        moved_bytes: of what it went on from, where another worker had handed that over.
        seconds: that the worker took.
    """

    status: Literal["computed", "refused", "declined", "unlike", "gone", "forgot"]
    worker: str
    reason: str = ""
    loss_sum: float = 0.0
    count: int = 0
    sizes: tuple[int, ...] = ()
    inline: bytes = b""
    attempt: str = ""
    digests: tuple[bytes, ...] = ()
    remembers: bool = False
    moved_bytes: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Remembered:
    """What the compression of a shard remembers, as a worker is to write it.

    Attributes:
        name: of the state.
        first: index of the first of its chunks within the version that is kept.
        earlier: where the newest checkpoint has an older state, some of whose chunks may be the same.
    """

    shard: int
    name: str
    first: int = 0
    earlier: Part | None = None


@dataclass(frozen=True, slots=True)
class MemoryOrder:
    """What a worker is told to write of what it remembers.

    Attributes:
        version, token: of the checkpoint that it is for, and of its master; a token of 0 is no checkpoint: then it goes
            to where whoever computes the shard next looks for it.
        holder: the worker that has it; "" for anybody, who looks where one may have handed it over.
    """

    version: int
    token: int
    holder: str
    states: tuple[Remembered, ...]


@dataclass(frozen=True, slots=True)
class MemoryResult:
    """What came of it.

    Attributes:
        parts: what was written for a checkpoint, as the order has it.
        reason: why it could not be: something is not there (any more); "" when it could.
        ready: False while it is still being written, from what was remembered when the order first came; the same order
            again asks for what came of it.
    """

    worker: str
    parts: tuple[Part, ...] = ()
    reason: str = ""
    ready: bool = True
