"""Frozen settings. The only reader of the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from taskmesh.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_PARTITIONS = 62**2  # a message's id has two digits for it
UNSIGNED = "unsigned"  # stands among signing keys
MIN_KEY_BYTES = 16

WhenFull = Literal["wait", "reject"]


@dataclass(frozen=True, slots=True)
class Durability:
    """What a submit waits for before it returns, beyond the primary's word. It narrows what a crash can take back;
    it does not rule it out.

    Attributes:
        replicas: so many replicas have the message in memory, or with ``aof`` on disk.
        aof: the primary's append-only file is on disk (Redis 7.2 or newer, or Valkey). Under ``appendfsync everysec``
            that takes up to a second, with replicas two.
        timeout: seconds to wait for that; then ``NotConfirmed`` is raised, and the message runs all the same.
    """

    replicas: int = 0
    aof: bool = False
    timeout: float = 1.0

    def __post_init__(self) -> None:
        if self.replicas < 0:
            raise ConfigurationError(f"replicas is {self.replicas}; it cannot be negative")
        if self.timeout <= 0:
            raise ConfigurationError(f"timeout is {self.timeout} s; it must be positive")

    @property
    def asks(self) -> bool:
        """Whether there is anything to wait for."""
        return self.aof or self.replicas > 0


@dataclass(frozen=True, slots=True)
class MeshSettings:
    """What a Mesh needs to know beside its name. Durations are seconds.

    Attributes:
        url: the Redis (or Valkey) to use; None starts or joins the local embedded one.
        bulk_url: a server for values that can be formed again (gradients, versions that are not kept);
            None uses ``url``, or the embedded one without AOF.
        data_folder: where the embedded server keeps its files; processes that name the same folder share it.
        liveness_ttl: a worker not heard of for so long is dead, and its work goes to others.
        result_ttl: how long result records live, unless the task says otherwise.
        inline_limit_bytes: larger payloads travel as blobs beside the message.
        max_payload_bytes: larger payloads are refused: at submit, in the worker, and where a result is read.
        retry_for: how long a call goes on trying to reach a server that is away.
        durability: what a submit waits for, unless the task says otherwise; None for the primary's word alone.
        signing_keys: the first signs messages and outcomes, each verifies them; none signs nothing. The word
            "unsigned" among them lets in what is not signed, and in the first place has nothing signed.
    """

    url: str | None = None
    bulk_url: str | None = None
    data_folder: Path = Path(".taskmesh")
    liveness_ttl: float = 10.0
    result_ttl: float = 3600.0
    inline_limit_bytes: int = 64 * KIB
    max_payload_bytes: int = 64 * MIB
    retry_for: float = 15.0
    durability: Durability | None = None
    signing_keys: tuple[str, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if self.liveness_ttl < 0.5:
            raise ConfigurationError(f"liveness_ttl is {self.liveness_ttl} s; it must be at least 0.5 s")
        if self.result_ttl < 0:
            raise ConfigurationError(f"result_ttl is {self.result_ttl} s; it cannot be negative")
        if not 0 < self.inline_limit_bytes <= self.max_payload_bytes:
            raise ConfigurationError("inline_limit_bytes must be positive and at most max_payload_bytes")
        if self.max_payload_bytes > 4 * GIB:
            raise ConfigurationError(
                f"max_payload_bytes is {self.max_payload_bytes:,}; it can be at most {4 * GIB:,}"
            )
        _check_keys(self.signing_keys)


def _check_keys(keys: object) -> None:
    """Refuse keys that cannot work; what they are is said nowhere."""
    if not isinstance(keys, tuple) or not all(isinstance(key, str) for key in keys):
        raise ConfigurationError("signing_keys must be a tuple of strings")
    for place, key in enumerate(keys, 1):
        size = len(key.encode("utf-8", "surrogateescape"))
        if key != UNSIGNED and size < MIN_KEY_BYTES:
            raise ConfigurationError(
                f"signing key {place} has {size} bytes; a key has at least {MIN_KEY_BYTES}"
            )
    if keys and all(key == UNSIGNED for key in keys):
        raise ConfigurationError(f"signing_keys holds the word {UNSIGNED!r} and no key")


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How a queue lies on its server, and how it treats its producers.

    Attributes:
        partitions: parts that the queue's messages are spread over. Each has a slot of its own in a cluster, and
            every worker serves them all; order and priority hold within a part. Raise it in the workers first.
        max_length: messages not settled yet (waiting, delayed and running) that the queue holds at most;
            None is unbounded. Each partition holds its share of it.
        when_full: "wait" holds the submitter back, "reject" raises QueueFull at once.
        wait_timeout: seconds that a submitter waits at most; None waits for ever.
    """

    partitions: int = 1
    max_length: int | None = None
    when_full: WhenFull = "wait"
    wait_timeout: float | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.partitions <= MAX_PARTITIONS:
            raise ConfigurationError(f"partitions is {self.partitions}; it must be 1 to {MAX_PARTITIONS}")
        if self.max_length is not None and self.max_length < self.partitions:
            raise ConfigurationError(
                f"max_length is {self.max_length}; it must be at least 1 for each of {self.partitions} partitions"
            )

    @property
    def partition_length(self) -> int:
        """What one partition holds at most; 0 for any number."""
        return 0 if self.max_length is None else -(-self.max_length // self.partitions)


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """How one worker runs. Durations are seconds.

    Attributes:
        queues: the queues to serve; empty serves every queue that the Mesh's tasks name.
        concurrency: handlers that run at once.
        fetch_ahead: measured work that may wait here beyond the free slots.
        max_fetch: deliveries in one fetch at most.
        drain_timeout: how long a drain waits for running handlers before it cancels them and hands back.
        hand_back_after: entries that wait here so long while no slot frees go back to the others.
        misfit_patience: a message whose arguments fit no worker's handler waits so long for a newer (or older)
            worker before it fails; 0 fails it at once.
        loop_grace: a loop blocked for longer than the running tasks' timeouts plus this ends the process.
        processes: children that handlers run in at most (``process=True``); None for one a CPU.
        heartbeat: what carries the lease. A "thread" costs nothing, and starves under a C call that holds the
            interpreter lock; a "process" (about 35 MB) does not: for a liveness TTL of a few seconds.
    """

    queues: tuple[str, ...] = ()
    concurrency: int = 100
    fetch_ahead: float = 0.05
    max_fetch: int = 1000
    drain_timeout: float = 30.0
    hand_back_after: float = 0.5
    misfit_patience: float = 300.0
    loop_grace: float = 30.0
    heartbeat: Literal["thread", "process"] = "thread"
    processes: int | None = None

    def __post_init__(self) -> None:
        if self.heartbeat not in ("thread", "process"):
            raise ConfigurationError(f'heartbeat is {self.heartbeat!r}; it is "thread" or "process"')
        if self.processes is not None and self.processes < 1:
            raise ConfigurationError(f"processes is {self.processes}; it must be at least 1")
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; it must be at least 1")


def cpu_count() -> int:
    """The CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number of seconds") from None


def _keys(text: str) -> tuple[str, ...]:
    return tuple(key.strip() for key in text.split(",")) if text.strip() else ()


def from_environment() -> MeshSettings:
    """The settings that ``TASKMESH_URL``, ``_BULK_URL``, ``_DATA``, ``_LIVENESS_TTL``, ``_RESULT_TTL`` and
    ``_SIGNING_KEYS`` (separated by commas) give.

    Raises:
        ConfigurationError: a value cannot be read.
    """
    default = MeshSettings()
    return MeshSettings(
        url=os.environ.get("TASKMESH_URL") or None,
        bulk_url=os.environ.get("TASKMESH_BULK_URL") or None,
        data_folder=Path(os.environ.get("TASKMESH_DATA") or default.data_folder),
        liveness_ttl=_seconds("TASKMESH_LIVENESS_TTL", default.liveness_ttl),
        result_ttl=_seconds("TASKMESH_RESULT_TTL", default.result_ttl),
        signing_keys=_keys(os.environ.get("TASKMESH_SIGNING_KEYS", "")),
    )
