"""What happened, as typed records, and who listens.

Observers only watch: they run inside the engine's loop, so they must be quick, and what they raise is
logged and goes no further. To change what happens, write a middleware (``taskmesh.worker.middleware``).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

log = logging.getLogger("taskmesh")


class Ending(msgspec.Struct, frozen=True, gc=False):
    """One settled delivery."""

    task: str
    status: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """Messages that the server accepted."""

    queue: str
    messages: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Fetched:
    """Deliveries that a worker received."""

    queue: str
    deliveries: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Deliveries that one settle call ended; ``dropped`` outcomes had lost their claim."""

    queue: str
    endings: Sequence[Ending]
    dropped: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Claimed:
    """Deliveries taken over from a worker that is dead, or that handed them back."""

    queue: str
    worker: str
    deliveries: int


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """This worker found itself struck off (stopped for longer than the liveness TTL) and took a new name."""

    worker: str


@dataclass(frozen=True, slots=True)
class Committed:
    """One training step became a version.

    Attributes:
        uplink_bytes: payloads of its shards, as they came.
        dense_bytes: what they would have been as fp32.
        downlink_bytes: what a worker fetches to have the version.
        metrics: those of its manifest: "loss", and what was measured of it.
        samples: that it was made from.
        lr: learning rate of the optimizer's first group in it; with local steps, the outer optimizer's.
        gradient_norm: of its mean gradient, before it was clipped; None where it is not clipped.
    """

    run: str
    version: int
    step: int
    loss: float
    seconds: float
    uplink_bytes: int
    dense_bytes: int
    downlink_bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    lr: float | None = None
    gradient_norm: float | None = None


@dataclass(frozen=True, slots=True)
class WaitingForLease:
    """A master has to wait, or may go on waiting as a standby: another leads the run."""

    run: str
    leader: str


@dataclass(frozen=True, slots=True)
class Resumed:
    """A master goes on from a checkpoint.

    Attributes:
        version: the checkpoint's.
        step: the updates that its parameters have seen.
    """

    run: str
    version: int
    step: int


@dataclass(frozen=True, slots=True)
class Validated:
    """A metric was measured: of a version that is committed next, or that the run goes back from.

    Attributes:
        seconds: that it took, and the run waited.
    """

    run: str
    step: int
    metric: str
    value: float
    seconds: float


@dataclass(frozen=True, slots=True)
class ShardRefused:
    """A gradient shard was not used."""

    run: str
    step: int
    shard: int
    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class ShardsLate:
    """A step was taken without some of its shards; their samples enter later steps.

    Attributes:
        samples: of them.
        owed: shards that are late by now, those of earlier steps included.
    """

    run: str
    step: int
    shards: tuple[int, ...]
    samples: int
    owed: int


@dataclass(frozen=True, slots=True)
class ShardRepeated:
    """A shard that a worker has had for long was given to another one as well.

    Attributes:
        worker: who has it.
        seconds: for how long.
    """

    run: str
    step: int
    shard: int
    worker: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A version became a checkpoint: complete, and in the run's history.

    Attributes:
        seconds: from its commit.
        size_bytes: all its parts.
        written_bytes: of them, those that no earlier checkpoint held.
        waited_seconds: that the run stood still for it, because the one before it was still on its way, or because a
            worker had not heard yet what to hold on to.
        copy_seconds: of the compute thread, to copy it aside; a step is held up by so much at most.
    """

    run: str
    version: int
    step: int
    seconds: float
    size_bytes: int
    written_bytes: int
    waited_seconds: float
    copy_seconds: float


@dataclass(frozen=True, slots=True)
class MirrorFailed:
    """A checkpoint could not be written to the run's mirror; it is complete in Redis."""

    run: str
    version: int
    reason: str


@dataclass(frozen=True, slots=True)
class RolledBack:
    """An older version became current, as a new version."""

    run: str
    version: int
    restored: int
    reason: str


@dataclass(frozen=True, slots=True)
class MemoryMoved:
    """What the compression of some shards remembered went to other workers, because those that had it have stopped."""

    run: str
    step: int
    shards: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryLost:
    """What the compression of some shards remembered is in no checkpoint; they begin anew."""

    run: str
    step: int
    shards: tuple[int, ...]
    reason: str


Event = (
    Submitted
    | Fetched
    | Settled
    | Claimed
    | WorkerLost
    | Committed
    | WaitingForLease
    | Resumed
    | Validated
    | ShardRefused
    | ShardRepeated
    | ShardsLate
    | Checkpointed
    | MirrorFailed
    | RolledBack
    | MemoryMoved
    | MemoryLost
)


class Observer(Protocol):
    """Anything that wants to know."""

    def on_event(self, event: Event) -> None: ...


class Observers:
    """The observers of one Mesh; an observer that raises does not disturb the others."""

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._observers = list(observers)

    def add(self, observer: Observer) -> None:
        self._observers.append(observer)

    def emit(self, event: Event) -> None:
        for observer in self._observers:
            try:
                observer.on_event(event)
            except Exception:
                log.exception("observer %r failed on %s", observer, type(event).__name__)

    def on_event(self, event: Event) -> None:
        """An observer itself: a worker's own observers stand before those of its Mesh."""
        self.emit(event)
