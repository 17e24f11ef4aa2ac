"""What goes wrong, and when: drawn from a seed before anything starts, so that a run can be made again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from typing import Literal, get_args

TopologyName = Literal["embedded", "single", "sentinel", "cluster"]
TOPOLOGIES: tuple[TopologyName, ...] = get_args(TopologyName)
LIVENESS_TTL = 1.0
CALM = 1.0  # seconds at the end in which nothing new begins


class Kind(StrEnum):
    """A fault. The names are the keys under ``faults`` in the report."""

    WORKER_KILL = "worker_kill"
    WORKER_STOP_SHORT = "worker_stop_short"
    WORKER_STOP_LONG = "worker_stop_long"
    WORKER_DRAIN = "worker_drain"
    PRODUCER_KILL = "producer_kill"
    PRODUCER_STOP = "producer_stop"
    PRODUCER_END = "producer_end"
    MASTER_KILL = "master_kill"
    MASTER_STOP = "master_stop"
    CUT = "connections_cut"
    HALF_OPEN = "connections_half_open"
    SLOW = "connections_slow"
    REPLY_CUT = "reply_cut"
    FULL = "server_full"
    SERVER_RESTART = "server_restart"
    SERVER_STOP = "server_stop"
    REPLICA_RESTART = "replica_restart"
    SENTINEL_RESTART = "sentinel_restart"
    SLOT_MIGRATION = "slot_migration"
    PRIMARY_KILL = "primary_kill"
    PRIMARY_STOP = "primary_stop"
    PRIMARY_RESTART = "primary_restart"


@dataclass(frozen=True, slots=True)
class Plan:
    """How often one kind comes: seconds from one to the next, and how long each lasts."""

    every: float
    shortest: float = 0.0
    longest: float = 0.0


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        at: seconds after the start.
        target: which process, wire or node; it is taken modulo how many there are.
        seconds: how long it lasts; for a process that ends, how long until its successor starts.
        share: which part of the connections, from 0 to 1.
    """

    at: float
    kind: Kind
    target: int
    seconds: float
    share: float


TTL = LIVENESS_TTL
_PROCESSES = {
    Kind.WORKER_KILL: Plan(3.5, 0.0, 0.5),
    Kind.WORKER_STOP_SHORT: Plan(6.0, 0.1 * TTL, 0.7 * TTL),
    Kind.WORKER_STOP_LONG: Plan(8.0, 1.5 * TTL, 3.0 * TTL),
    Kind.WORKER_DRAIN: Plan(5.0, 0.0, 0.5),
    Kind.PRODUCER_KILL: Plan(8.0, 0.0, 0.5),
    Kind.PRODUCER_STOP: Plan(9.0, 0.2, 2.5),
    Kind.PRODUCER_END: Plan(9.0, 0.0, 0.5),
    Kind.MASTER_KILL: Plan(8.0, 0.0, 1.0),
    Kind.MASTER_STOP: Plan(11.0, 0.2, 3.0),
}
_CUTS = {Kind.CUT: Plan(4.0), Kind.FULL: Plan(8.0, 0.8, 2.0)}
_WIRES = {
    Kind.HALF_OPEN: Plan(7.0),
    Kind.SLOW: Plan(7.0, 0.5, 2.0),
    Kind.REPLY_CUT: Plan(3.0),
}
_ONE_SERVER = {Kind.SERVER_RESTART: Plan(8.0, 0.0, 0.8), Kind.SERVER_STOP: Plan(9.0, 0.2, 1.5)}
_REPLICATED = {Kind.REPLICA_RESTART: Plan(9.0, 0.0, 1.0)}
_SENTINELS = {Kind.SENTINEL_RESTART: Plan(8.0, 0.0, 1.0)}
_CLUSTER = {Kind.SLOT_MIGRATION: Plan(5.0)}
_PRIMARY_LOSS = {
    Kind.PRIMARY_KILL: Plan(14.0, 3.0, 5.0),
    Kind.PRIMARY_STOP: Plan(19.0, 5.0, 7.0),
    Kind.PRIMARY_RESTART: Plan(19.0, 0.0, 0.3),
}


def plans_of(topology: TopologyName, primary_loss: bool) -> dict[Kind, Plan]:
    """The kinds that apply to a topology. Without ``primary_loss`` no primary of several is touched."""
    plans = _PROCESSES | _CUTS
    if topology != "embedded":  # its clients reach the server through a unix socket, with no wire between
        plans |= _WIRES
    if topology in ("embedded", "single"):
        return plans | _ONE_SERVER
    plans |= _REPLICATED | (_SENTINELS if topology == "sentinel" else _CLUSTER)
    return plans | _PRIMARY_LOSS if primary_loss else plans


def draw_schedule(
    seed: int, seconds: float, topology: TopologyName, primary_loss: bool = False
) -> list[Fault]:
    """The faults of a run, in order of time. In a short run each kind comes once at least."""
    faults = [
        fault
        for kind, plan in plans_of(topology, primary_loss).items()
        for fault in _draw_kind(Random(f"{seed}:{kind}"), kind, plan, max(0.0, seconds - CALM))
    ]
    return sorted(faults, key=lambda fault: (fault.at, fault.kind))


def _draw_kind(draw: Random, kind: Kind, plan: Plan, seconds: float) -> Iterator[Fault]:
    # A kind's own generator: leaving another kind out moves none of these.
    at = draw.uniform(0.1, 0.9) * min(plan.every, seconds)
    while at < seconds:
        yield Fault(
            round(at, 3),
            kind,
            draw.randrange(1 << 16),
            round(draw.uniform(plan.shortest, plan.longest), 3),
            round(draw.uniform(0.2, 0.7), 2),
        )
        at += plan.every * draw.uniform(0.6, 1.4)
