"""The state of a whole Mesh at one moment, read from its servers in two round trips.

Nothing is searched for: the queues are those that the Mesh's tasks name, the workers those in the queues' lists,
the runs those that registered with the Mesh. Reading changes nothing, and costs the server microseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from taskmesh.broker.caller import Caller
from taskmesh.broker.link import Argument
from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerError
from taskmesh.keys import GROUP, RETURNED
from taskmesh.messages import Priority
from taskmesh.monitoring import metrics
from taskmesh.monitoring.metrics import Samples
from taskmesh.settings import MeshSettings
from taskmesh.tasks import Registry

Request = tuple[bytes, tuple[Argument, ...]]
NODE_SECTIONS = ("INFO", "server", "memory", "clients")


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
            metrics.WAITING: {(queue.name, lane.lane): lane.waiting for queue in queues for lane in queue.lanes},
            metrics.PENDING: {(queue.name, lane.lane): lane.pending for queue in queues for lane in queue.lanes},
            metrics.DELAYED: {(queue.name,): queue.delayed for queue in queues},
            metrics.DEAD: {(queue.name,): queue.dead for queue in queues},
            metrics.PARKED: {(queue.name,): queue.parked for queue in queues},
            metrics.OLDEST_AGE: {(queue.name,): queue.oldest_age or 0.0 for queue in queues},
            metrics.VERSION: {(run.name,): run.version for run in runs},
            metrics.LOSS: {(run.name,): run.loss for run in runs if run.loss is not None},
        }


class RunReader(Protocol):
    """What a training run registers in ``mesh.runs`` under its name, to be part of every snapshot."""

    async def status(self) -> RunStatus | None:
        """How it stands; None when the server knows nothing of it yet."""


class _Client(Protocol):
    caller: Caller
    bulk: Caller

    def partition(self, queue: str) -> Partition: ...


class WatchedMesh(Protocol):
    """The Mesh, as far as it is looked at here."""

    name: str
    settings: MeshSettings
    registry: Registry
    runs: dict[str, RunReader]

    @property
    def client(self) -> _Client: ...


@dataclass(frozen=True, slots=True)
class _Lane:
    """What the first round trip tells of a lane."""

    length: int
    pending: int
    consumers: dict[bytes, int]
    last_delivered: bytes


async def snapshot(mesh: WatchedMesh) -> MeshSnapshot:
    """Look at a Mesh that is entered (``async with mesh:``).

    The counts of one queue belong to one moment; those of different queues may lie microseconds apart.

    Raises:
        ConfigurationError: the Mesh is not entered.
        BrokerError: a server is away, or refuses (a user without the rights to look).
    """
    client = mesh.client
    partitions = [client.partition(queue) for queue in mesh.registry.queues]
    bulk = [] if client.bulk is client.caller else [_node_statuses(client.bulk, [b"time"], "bulk")]
    queues, servers, *rest = await asyncio.gather(
        _queues(client.caller, partitions, mesh.settings.liveness_ttl),
        _node_statuses(client.caller, [b"time", *(partition.keys.tag for partition in partitions)], "main"),
        *bulk,
    )
    now_ms, queue_statuses, workers = queues
    runs = [await reader.status() for reader in mesh.runs.values()]
    return MeshSnapshot(
        mesh.name,
        now_ms,
        queue_statuses,
        workers,
        (*servers, *(server for more in rest for server in more)),
        tuple(run for run in runs if run is not None),
    )


# queues and workers


def _first_round(partition: Partition) -> list[Request]:
    keys = partition.keys
    commands: list[tuple[Argument, ...]] = []
    for lane in keys.lanes:
        commands += [("XLEN", lane), ("XPENDING", lane, GROUP), ("XINFO", "GROUPS", lane)]
    commands += [
        ("ZCARD", keys.delayed),
        ("XLEN", keys.dead),
        ("XLEN", keys.parked),
        ("ZRANGE", keys.workers, 0, -1, "WITHSCORES"),
        ("TIME",),
    ]
    return [(keys.tag, command) for command in commands]


async def _queues(
    caller: Caller, partitions: Sequence[Partition], ttl: float
) -> tuple[int, tuple[QueueStatus, ...], tuple[WorkerStatus, ...]]:
    first = [_first_round(partition) for partition in partitions]
    replies = await caller.read_many([(b"time", ("TIME",)), *(request for part in first for request in part)])
    now_ms = _milliseconds(replies[0]) + caller.clock.offset_ms
    answers: list[list[Any]] = []
    place = 1
    for part in first:
        answers.append(replies[place : place + len(part)])
        place += len(part)
    lanes = [[_lane(*_three(answer, lane)) for lane in range(len(Priority))] for answer in answers]
    oldest = await _oldest_waiting(caller, partitions, lanes)
    statuses: list[QueueStatus] = []
    heard: dict[str, tuple[float, list[str], int]] = {}
    for partition, answer, found, since_ms in zip(partitions, answers, lanes, oldest, strict=True):
        delayed, dead, parked, workers, time = (_checked(reply) for reply in answer[-5:])
        here_ms = _milliseconds(time) + caller.clock.offset_ms
        age = None if since_ms is None else max(0.0, (here_ms - since_ms) / 1000)
        queue = partition.keys.queue
        statuses.append(QueueStatus(queue, _lane_statuses(found), int(delayed), int(dead), int(parked), age))
        for name, seen in zip(workers[::2], workers[1::2], strict=True):
            if name == RETURNED:
                continue
            holds = sum(lane.consumers.get(name, 0) for lane in found)
            since = max(0.0, (here_ms - float(seen)) / 1000)
            before = heard.get(name.decode(), (since, [], 0))
            heard[name.decode()] = (min(since, before[0]), [*before[1], queue], before[2] + holds)
    alive = tuple(
        WorkerStatus(name, tuple(queues), holds, since, since <= ttl)
        for name, (since, queues, holds) in sorted(heard.items())
    )
    return now_ms, tuple(statuses), alive


def _three(answer: list[Any], lane: int) -> tuple[Any, Any, Any]:
    length, pending, groups = answer[3 * lane : 3 * lane + 3]
    return _checked(length), pending, groups


def _lane(length: Any, pending: Any, groups: Any) -> _Lane:
    """A stream that no worker has entered yet has no group, and may not be there at all."""
    last_delivered = b"0-0"
    for flat in () if isinstance(groups, BrokerError) else groups:
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        if fields[b"name"] == GROUP:
            last_delivered = fields[b"last-delivered-id"]
    count, _, _, consumers = (0, None, None, None) if isinstance(pending, BrokerError) else pending
    return _Lane(int(length), int(count), {name: int(held) for name, held in consumers or ()}, last_delivered)


def _lane_statuses(lanes: Sequence[_Lane]) -> tuple[LaneStatus, ...]:
    statuses: list[LaneStatus] = []
    for priority, lane in zip(Priority, lanes, strict=True):
        held = lane.pending - lane.consumers.get(RETURNED, 0)
        statuses.append(LaneStatus(priority.name.lower(), max(0, lane.length - held), held))
    return tuple(statuses)


async def _oldest_waiting(
    caller: Caller, partitions: Sequence[Partition], lanes: Sequence[Sequence[_Lane]]
) -> list[float | None]:
    """Redis time in ms at which the oldest waiting message of each queue was added."""
    requests: list[Request] = []
    owners: list[int] = []
    for owner, (partition, found) in enumerate(zip(partitions, lanes, strict=True)):
        for key, lane in zip(partition.keys.lanes, found, strict=True):
            if lane.length > lane.pending:
                after = b"(" + lane.last_delivered
                requests.append((partition.keys.tag, ("XRANGE", key, after, "+", "COUNT", 1)))
                owners.append(owner)
            if lane.consumers.get(RETURNED):
                requests.append((partition.keys.tag, ("XPENDING", key, GROUP, "-", "+", 1, RETURNED)))
                owners.append(owner)
    oldest: list[float | None] = [None] * len(partitions)
    if not requests:
        return oldest
    for owner, rows in zip(owners, await caller.read_many(requests), strict=True):
        if rows and not isinstance(rows, BrokerError):
            at_ms = float(rows[0][0].partition(b"-")[0])
            known = oldest[owner]
            oldest[owner] = at_ms if known is None else min(known, at_ms)
    return oldest


# servers


async def _node_statuses(caller: Caller, tags: Sequence[bytes], role: str) -> list[ServerStatus]:
    """Every node that serves one of the tags."""
    tags = list({caller.server.link(tag): tag for tag in tags}.values())
    statuses: dict[str, ServerStatus] = {}
    for reply in await caller.read_many([(tag, NODE_SECTIONS) for tag in tags]):
        fields = _fields(_checked(reply))
        name = fields.get("run_id", caller.server.where)
        where = caller.server.where if not caller.server.is_cluster else f"port {fields.get('tcp_port', '?')}"
        kind = "Valkey" if "valkey_version" in fields else "Redis"
        statuses[name] = ServerStatus(
            where,
            role,
            f"{kind} {fields.get('valkey_version') or fields.get('redis_version', '?')}",
            int(fields.get("used_memory", 0)),
            int(fields.get("maxmemory", 0)),
            int(fields.get("connected_clients", 0)),
        )
    return list(statuses.values())


def _fields(information: bytes) -> Mapping[str, str]:
    lines = (line.partition(":") for line in information.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _checked(reply: Any) -> Any:
    if isinstance(reply, BrokerError):
        raise reply
    return reply


def _milliseconds(time: Sequence[bytes]) -> int:
    return int(time[0]) * 1000 + int(time[1]) // 1000
