"""What a run's master and its workers say to each other about a shard."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from taskmesh.checkpoints.manifest import Part


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
        reason: of a refusal, in words; what an unlike worker is.
        sizes: bytes of each piece of the payload.
        digests: of each piece, where they lie in chunks.
        attempt: names the delivery.
        remembers: this worker holds what the shard's compression remembers, under the attempt's name.
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
