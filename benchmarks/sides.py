"""The sides: what the driver has to know about each peer, and about ours, before it starts anything of it.

A side's `pending` counts, in the queue's own keys, what has not been settled yet. A drain has ended when it
is 0 and every task has marked its end. It must not count too little: where a peer keeps a task in a second
place until it is acknowledged, that place is in the sum.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import redis

from benchmarks import environments

Measure = Literal["drain", "drain_results", "drain_suspending", "sleep", "round_trip", "delayed", "recovery"]
Pending = Callable[[redis.Redis], int]


@dataclass(frozen=True)
class Plan:
    """How a side's worker is set for one measure."""

    concurrency: int = 100
    variant: str = ""


@dataclass(frozen=True)
class Side:
    """One side of the comparison. `name` is also its adapter: `benchmarks.peers.<name>`."""

    name: str
    pending: Pending
    has_results: bool = True  # without a result store there are no figures with results
    suspends: bool = True  # its handlers are coroutines
    plans: Mapping[str, Plan] = field(default_factory=dict)  # by measure; the others take `Plan()`
    is_ours: bool = False

    def plan(self, measure: Measure) -> Plan:
        """The worker's settings for a measure."""
        return self.plans.get(measure, Plan())

    def python(self) -> Path:
        """The interpreter that runs this side, made now if it must be. Raises environments.InstallFailed."""
        return Path(sys.executable) if self.is_ours else environments.python_of(self.name)


def unsettled_in_stream(client: redis.Redis, name: str, group: str) -> int:
    """Entries that the group has delivered but not acknowledged, and 1 more while there are undelivered ones.

    It goes by the last ids, since `lag` is unknown to Redis once an entry has been deleted.
    """
    state = client.xinfo_stream(name)
    for one in client.xinfo_groups(name):
        if one["name"] == group.encode():
            unread = one["last-delivered-id"] != state["last-generated-id"]
            return int(one["pending"]) + int(unread)
    return 1  # nobody has made the group yet


def _taskiq(client: redis.Redis) -> int:
    return unsettled_in_stream(client, "taskiq", "taskiq")  # XACK, and the entry stays


def _faststream(client: redis.Redis) -> int:
    for task in ("noop", "suspend", "nap"):  # a stream each; likewise
        if unsettled := unsettled_in_stream(client, f"s:{task}", "g"):
            return unsettled
    return 0


def _streaq(client: redis.Redis) -> int:
    return client.xlen("streaq:default:queues:normal")  # XACK + XDEL in one transaction


def _docket(client: redis.Redis) -> int:
    return client.xlen("peer:stream") + client.zcard("peer:queue")  # XACK + XDEL in one script


def _arq(client: redis.Redis) -> int:
    return client.zcard("arq:queue")  # a job leaves it in the transaction that ends it


def _saq(client: redis.Redis) -> int:
    waiting = client.llen("saq:default:queued") + client.llen("saq:default:active")
    return waiting + client.zcard("saq:default:incomplete")


def _huey(client: redis.Redis) -> int:
    return client.llen("huey.redis.peer")  # popped before it runs: there is no acknowledgement


def _dramatiq(client: redis.Redis) -> int:
    return client.hlen("dramatiq:default.msgs")  # a message leaves it when it is acknowledged


def _celery(client: redis.Redis) -> int:
    return client.llen("peer") + client.hlen("unacked")


_FEW_THREADS = {measure: Plan(8, "threads") for measure in ("drain", "round_trip")}
PEERS: dict[str, Side] = {
    side.name: side
    for side in (
        Side("taskiq", _taskiq),
        Side("faststream", _faststream, has_results=False),
        Side("streaq", _streaq),
        Side("arq", _arq),
        Side("saq", _saq),
        Side(
            "huey",
            _huey,
            suspends=False,
            plans={
                **{measure: Plan(100, "greenlet") for measure in ("drain", "drain_results", "sleep")},
                "round_trip": Plan(8, "thread"),
            },
        ),
        Side(
            "dramatiq",
            _dramatiq,
            suspends=False,
            plans={"drain": Plan(64), "drain_results": Plan(64), "round_trip": Plan(8)},
        ),
        Side("docket", _docket),
        Side(
            "celery",
            _celery,
            suspends=False,
            plans={**_FEW_THREADS, "drain_results": Plan(2, "prefork"), "sleep": Plan(100, "threads")},
        ),
    )
}


def ours() -> Side | None:
    """Our own side, once `benchmarks/peers/ours.py` is there.

    That adapter has, besides the functions that every adapter has, `pending(client)` and, if it wants the
    figures that go with them, `enqueue_delayed(task, i, delay)` and `LIVENESS_TTL_S`.
    """
    if importlib.util.find_spec("benchmarks.peers.ours") is None:
        return None

    def pending(client: redis.Redis) -> int:
        return int(importlib.import_module("benchmarks.peers.ours").pending(client))

    return Side("ours", pending, plans={"recovery": Plan(10)}, is_ours=True)
