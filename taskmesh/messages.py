"""What travels: a message, its delivery to a worker, and the outcome that ends it."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Any

import msgspec


class Priority(IntEnum):
    """The lane of a queue; a busy worker serves the lanes in the proportion 12 : 3 : 1."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Status(StrEnum):
    """How a delivery ended. The first four end the message; the others let it go on."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    RETRIED = "retried"
    UNKNOWN = "unknown"
    PASSED_ON = "passed_on"
    UNDECODABLE = "undecodable"


class Message(msgspec.Struct, frozen=True, gc=False):
    """One submitted call.

    Attributes:
        id: unique; the first 12 characters name the producer.
        task: the task's name within its Mesh.
        args, kwargs: the arguments as wire values, or the chunks' count when they travel as a blob.
        priority: the lane.
        attempt: 1 for the first; a retry raises it.
        expires_at_ms: Redis time after which it is dropped unless it has started; 0 is never.
        blob_chunks: the arguments lie in so many blob chunks; 0 when they are inline.
        result_ttl_ms: how long its result is kept; -1 as the task says, 0 not at all.
        blob_digest: of the arguments that travel as a blob, in a signed message; else empty.
        misfits: how often its arguments did not fit a worker's handler.
        unfit: the fingerprint of the last such handler's signature.
    """

    id: str
    task: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    priority: Priority = Priority.NORMAL
    attempt: int = 1
    expires_at_ms: int = 0
    blob_chunks: int = 0
    result_ttl_ms: int = -1
    blob_digest: bytes = b""
    misfits: int = 0
    unfit: int = 0

    def __repr__(self) -> str:
        """Without the arguments: this may be printed anywhere."""
        return f"<Message {self.id} of task {self.task!r}, attempt {self.attempt}>"


class Entry(msgspec.Struct, frozen=True, gc=False):
    """A stream entry as fetched, not looked into yet; ``message`` is None where it was deleted meanwhile."""

    lane: Priority
    id: bytes
    message: bytes | None
    deliveries: int

    def __repr__(self) -> str:
        return f"<Entry {self.id.decode()}>"


class Failure(msgspec.Struct, frozen=True, gc=False):
    """An exception as it travels."""

    type: str
    message: str
    traceback: str = ""
    args: tuple[Any, ...] = ()


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """How a task ended, as its submitter sees it: ``value`` when it succeeded, ``failure`` when it did not."""

    status: Status
    value: Any = None
    failure: Failure | None = None


class DeadLetter(msgspec.Struct, frozen=True):
    """A message that was parked, and why.

    Attributes:
        entry: its id in the dead-letter stream.
        reason: "failed", "no handler", "undecodable", "worker died" and the like.
        message: None when its bytes cannot be decoded.
        raw: the bytes as they were found.
        at_ms: Redis time of the ending.
        partition: the part of the queue that it lies in.
    """

    entry: str
    queue: str
    reason: str
    message: Message | None
    raw: bytes
    deliveries: int
    worker: str
    failure: Failure | None
    at_ms: int
    partition: int = 0

    def __repr__(self) -> str:
        """Without the arguments and the bytes."""
        return f"<DeadLetter {self.entry} on queue {self.queue!r}: {self.reason}, {self.message}>"
