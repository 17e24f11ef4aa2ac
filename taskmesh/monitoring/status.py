"""What a snapshot of a Mesh says, as plain frozen records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taskmesh.monitoring import metrics
from taskmesh.monitoring.metrics import Samples


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One priority of a queue.

    Attributes:
        waiting: messages that no worker has yet, those handed back included.
        pending: messages that workers hold.
    """

    lane: str
    waiting: int
    pending: int


@dataclass(frozen=True, slots=True)
class QueueStatus:
    """One queue.

    Attributes:
        delayed: messages that are due later.
        dead: dead letters.
        parked: messages whose task no live worker knows.
        oldest_age: seconds that the oldest waiting message has waited; None when none waits.
    """

    name: str
    lanes: tuple[LaneStatus, ...]
    delayed: int
    dead: int
    parked: int
    oldest_age: float | None

    @property
    def waiting(self) -> int:
        return sum(lane.waiting for lane in self.lanes)

    @property
    def pending(self) -> int:
        return sum(lane.pending for lane in self.lanes)


def whole(parts: Sequence[QueueStatus]) -> QueueStatus:
    """A queue as the sum of its partitions."""
    if len(parts) == 1:
        return parts[0]
    lanes = tuple(
        LaneStatus(lanes[0].lane, sum(lane.waiting for lane in lanes), sum(lane.pending for lane in lanes))
        for lanes in zip(*(part.lanes for part in parts), strict=True)
    )
    return QueueStatus(
        parts[0].name,
        lanes,
        sum(part.delayed for part in parts),
        sum(part.dead for part in parts),
        sum(part.parked for part in parts),
        max((part.oldest_age for part in parts if part.oldest_age is not None), default=None),
    )


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """One incarnation of a worker that has not left.

    Attributes:
        holds: messages that it holds, over all its queues.
        last_seen_age: seconds since its last heartbeat.
        is_alive: heard of within the liveness TTL.
    """

    name: str
    queues: tuple[str, ...]
    holds: int
    last_seen_age: float
    is_alive: bool


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One node. ``role`` is "main" or "bulk"; a memory limit of 0 is none."""

    name: str
    role: str
    version: str
    memory_used_bytes: int
    memory_limit_bytes: int
    clients: int


@dataclass(frozen=True, slots=True)
class RunStatus:
    """One training run, as its last commit left it."""

    name: str
    version: int
    step: int
    loss: float | None


@dataclass(frozen=True, slots=True)
class MeshSnapshot:
    """Everything at once. ``at_ms`` is Redis time."""

    mesh: str
    at_ms: int
    queues: tuple[QueueStatus, ...]
    workers: tuple[WorkerStatus, ...]
    servers: tuple[ServerStatus, ...]
    runs: tuple[RunStatus, ...]

    def gauges(self) -> Samples:
        """The same under the names of ``taskmesh.monitoring.metrics``."""
        queues, servers, runs = self.queues, self.servers, self.runs
        alive = sum(worker.is_alive for worker in self.workers)
        return {
            metrics.WORKERS_ALIVE: {(): alive},
            metrics.MEMORY_USED: {(server.name,): server.memory_used_bytes for server in servers},
            metrics.MEMORY_LIMIT: {(server.name,): server.memory_limit_bytes for server in servers},
            metrics.CLIENTS: {(server.name,): server.clients for server in servers},
            metrics.WAITING: {
                (queue.name, lane.lane): lane.waiting for queue in queues for lane in queue.lanes
            },
            metrics.PENDING: {
                (queue.name, lane.lane): lane.pending for queue in queues for lane in queue.lanes
            },
            metrics.DELAYED: {(queue.name,): queue.delayed for queue in queues},
            metrics.DEAD: {(queue.name,): queue.dead for queue in queues},
            metrics.PARKED: {(queue.name,): queue.parked for queue in queues},
            metrics.OLDEST_AGE: {(queue.name,): queue.oldest_age or 0.0 for queue in queues},
            metrics.VERSION: {(run.name,): run.version for run in runs},
            metrics.LOSS: {(run.name,): run.loss for run in runs if run.loss is not None},
        }
