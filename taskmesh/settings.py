"""Frozen settings. The only reader of the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from taskmesh.errors import ConfigurationError

KIB = 1024
MIB = 1024 * KIB

WhenFull = Literal["wait", "reject"]


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
        max_payload_bytes: larger payloads are refused at submit.
        retry_for: how long a call goes on trying to reach a server that is away.
    """

    url: str | None = None
    bulk_url: str | None = None
    data_folder: Path = Path(".taskmesh")
    liveness_ttl: float = 10.0
    result_ttl: float = 3600.0
    inline_limit_bytes: int = 64 * KIB
    max_payload_bytes: int = 64 * MIB
    retry_for: float = 15.0

    def __post_init__(self) -> None:
        if self.liveness_ttl < 0.5:
            raise ConfigurationError(f"liveness_ttl is {self.liveness_ttl} s; it must be at least 0.5 s")
        if self.result_ttl < 0:
            raise ConfigurationError(f"result_ttl is {self.result_ttl} s; it cannot be negative")
        if not 0 < self.inline_limit_bytes <= self.max_payload_bytes:
            raise ConfigurationError("inline_limit_bytes must be positive and at most max_payload_bytes")


@dataclass(frozen=True, slots=True)
class QueueOptions:
    """How a queue treats its producers.

    Attributes:
        max_length: messages not settled yet (waiting, delayed and running) that the queue holds at most;
            None is unbounded.
        when_full: "wait" holds the submitter back, "reject" raises QueueFull at once.
        wait_timeout: seconds that a submitter waits at most; None waits for ever.
    """

    max_length: int | None = None
    when_full: WhenFull = "wait"
    wait_timeout: float | None = None

    def __post_init__(self) -> None:
        if self.max_length is not None and self.max_length < 1:
            raise ConfigurationError(f"max_length is {self.max_length}; it must be at least 1")


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
        loop_grace: a loop blocked for longer than the running tasks' timeouts plus this ends the process.
    """

    queues: tuple[str, ...] = ()
    concurrency: int = 100
    fetch_ahead: float = 0.05
    max_fetch: int = 1000
    drain_timeout: float = 30.0
    hand_back_after: float = 0.5
    loop_grace: float = 30.0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ConfigurationError(f"concurrency is {self.concurrency}; it must be at least 1")


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        return float(text)
    except ValueError:
        raise ConfigurationError(f"{name} is {text!r}; it must be a number of seconds") from None


def from_environment() -> MeshSettings:
    """The settings that ``TASKMESH_URL``, ``_BULK_URL``, ``_DATA``, ``_LIVENESS_TTL`` and ``_RESULT_TTL`` give.

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
    )
