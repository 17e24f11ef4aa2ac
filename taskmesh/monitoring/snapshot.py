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
from taskmesh.keys import GROUP, RETURNED, SUSPECTS
from taskmesh.messages import Priority
from taskmesh.monitoring.status import (
    LaneStatus,
    MeshSnapshot,
    QueueStatus,
    RunStatus,
    ServerStatus,
    WorkerStatus,
    whole,
)
from taskmesh.settings import MeshSettings
from taskmesh.tasks import Registry

Request = tuple[bytes, tuple[Argument, ...]]
NODE_SECTIONS = ("INFO", "server", "memory", "clients")


class RunReader(Protocol):
    """What a training run registers in ``mesh.runs`` under its name, to be part of every snapshot."""

    async def status(self) -> RunStatus | None:
        """How it stands; None when the server knows nothing of it yet."""


class _Client(Protocol):
    caller: Caller
    bulk: Caller

    def partitions(self, queue: str) -> list[Partition]: ...


class WatchedMesh(Protocol):
    """The Mesh, as far as it is looked at here."""

    name: str
    settings: MeshSettings
    registry: Registry
    runs: dict[str, RunReader]

    @property
    def client(self) -> _Client: ...


class EnterableMesh(WatchedMesh, Protocol):
    """A Mesh that the watcher enters itself."""

    async def __aenter__(self) -> object: ...

    async def __aexit__(self, *_: object) -> None: ...


@dataclass(frozen=True, slots=True)
class _Lane:
    """What the first round trip tells of a lane."""

    length: int
    pending: int
    consumers: dict[bytes, int]
    last_delivered: bytes


async def snapshot(mesh: WatchedMesh) -> MeshSnapshot:
    """Look at a Mesh that is entered (``async with mesh:``).

    Its parts may lie microseconds apart: nothing is locked while it is read.

    Raises:
        ConfigurationError: the Mesh is not entered.
        BrokerError: a server is away, or refuses (a user without the rights to look).
    """
    client = mesh.client
    partitions = [each for queue in mesh.registry.queues for each in client.partitions(queue)]
    main_tags = [b"time", *(partition.keys.tag for partition in partitions)]
    bulk_tags = [] if client.bulk is client.caller else [b"time"]
    (now_ms, queues, workers), main, bulk = await asyncio.gather(
        _queues(client.caller, partitions, mesh.settings.liveness_ttl),
        _node_statuses(client.caller, main_tags, "main"),
        _node_statuses(client.bulk, bulk_tags, "bulk"),
    )
    runs = [await reader.status() for reader in mesh.runs.values()]
    known = tuple(run for run in runs if run is not None)
    return MeshSnapshot(mesh.name, now_ms, queues, workers, (*main, *bulk), known)


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
    statuses: dict[str, list[QueueStatus]] = {}
    heard: dict[str, tuple[float, list[str], int]] = {}
    for partition, answer, found, since_ms in zip(partitions, answers, lanes, oldest, strict=True):
        delayed, dead, parked, workers, time = (_checked(reply) for reply in answer[-5:])
        here_ms = _milliseconds(time) + caller.clock.offset_ms
        age = None if since_ms is None else max(0.0, (here_ms - since_ms) / 1000)
        queue = partition.keys.queue
        status = QueueStatus(queue, _lane_statuses(found), int(delayed), int(dead), int(parked), age)
        statuses.setdefault(queue, []).append(status)
        for name, seen in zip(workers[::2], workers[1::2], strict=True):
            if name in (RETURNED, SUSPECTS):
                continue
            holds = sum(lane.consumers.get(name, 0) for lane in found)
            since = max(0.0, (here_ms - float(seen)) / 1000)
            before = heard.get(name.decode("utf-8", "replace"), (since, [], 0))
            heard[name.decode("utf-8", "replace")] = (
                min(since, before[0]),
                [*before[1], queue],
                before[2] + holds,
            )
    alive = tuple(
        WorkerStatus(name, tuple(dict.fromkeys(queues)), holds, since, since <= ttl)
        for name, (since, queues, holds) in sorted(heard.items())
    )
    return now_ms, tuple(whole(parts) for parts in statuses.values()), alive


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
        held = lane.pending - lane.consumers.get(RETURNED, 0) - lane.consumers.get(SUSPECTS, 0)
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
            for consumer in (RETURNED, SUSPECTS):
                if lane.consumers.get(consumer):
                    requests.append((partition.keys.tag, ("XPENDING", key, GROUP, "-", "+", 1, consumer)))
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
    replies = await caller.read_many([(tag, NODE_SECTIONS) for tag in tags])
    for tag, reply in zip(tags, replies, strict=True):
        fields = _fields(_checked(reply))
        node = caller.server.node(tag)
        kind = "Valkey" if "valkey_version" in fields else "Redis"
        statuses[node] = ServerStatus(
            node,
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
