"""What a run's master and its workers say to each other about a shard."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from taskmesh.checkpoints.manifest import Part


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """What a worker is told to compute.

    Attributes:
        agreement: what this master and its workers must have alike (``RunSetup.agreement``).
        avoid: workers that leave it to others.
    """

    version: int
    step: int
    shard: int
    indices: tuple[int, ...]
    parameters: Part
    layout: str
    agreement: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What came of it.

    The payload is the gradient, compressed bucket by bucket, then the float and the integer buffers, where there are
    any. Small ones ride in the result, large ones lie in chunks, one a piece.

    Attributes:
        status: "computed"; "refused" for a loss or gradient that is not finite; "declined" by a worker that was to
            be avoided; "gone" when the parameters could not be fetched.
        reason: of a refusal, in words.
        sizes: bytes of each piece of the payload.
        digests: of each piece, where they lie in chunks.
        attempt: names the delivery, where they do.
    """

    status: Literal["computed", "refused", "declined", "gone"]
    worker: str
    reason: str = ""
    loss_sum: float = 0.0
    count: int = 0
    sizes: tuple[int, ...] = ()
    inline: bytes = b""
    attempt: str = ""
    digests: tuple[bytes, ...] = ()
