"""What it costs to have much beside the work: delayed messages, entries of a worker that holds them, many workers."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.depth.crowd import Crowd
from benchmarks.depth.drains import Queue
from benchmarks.measure import WARMUP, percentile
from benchmarks.processes import Children
from benchmarks.servers import Server
from benchmarks.sides import Side

TTL = 10.0  # the default of MeshSettings
TAKEOVER_TTL = 2.0


@dataclass(frozen=True)
class Load:
    """What lies beside the work: messages that are not due, entries that one worker holds, workers that only live."""

    delayed: int = 0
    held: int = 0
    workers: int = 0


@dataclass(frozen=True)
class Scale:
    """How much is measured beside it."""

    load: Load = Load(100_000, 100_000, 500)
    drain: int = 400_000
    round_trips: int = 500
    idle_seconds: float = 3.0


def loads(full: Load) -> dict[str, Load]:
    """Each kind alone, and all together."""
    nothing = Load()
    return {
        "nothing": nothing,
        "delayed": replace(nothing, delayed=full.delayed),
        "held": replace(nothing, held=full.held),
        "workers": replace(nothing, workers=full.workers),
        "all": full,
    }


def measure_beside(side: Side, folder: Path, scale: Scale, load: Load) -> dict[str, float]:
    """The server's processor time while nothing is done, round trips, and a drain, beside a load."""
    with Server() as server, contextlib.ExitStack() as stack:
        children = Children(
            side, folder, server.url, folder / "ours.slots", side.plan("round_trip"), results=True, ttl=TTL
        )
        _lay(children, server, load, stack)
        queue = Queue(side, folder, server, ttl=TTL, held=load.held)
        queue.expect(max(WARMUP, scale.round_trips))
        with children.worker() as worker:
            samples = children.ask("latency", WARMUP, scale.round_trips, 20.0)["samples"]
            worker.check()
            share = _server_share(server, scale.idle_seconds)
        queue.fill(scale.drain)
        used = _cpu_seconds(server)
        rate = queue.drain()
        used = _cpu_seconds(server) - used
    return {
        "server_cpu_share": share,
        "round_trip_p50_s": percentile(samples, 0.5),
        "drain_per_s": rate,
        "server_cpu_s_per_task": used / scale.drain,
    }


def _lay(children: Children, server: Server, load: Load, stack: contextlib.ExitStack) -> None:
    if load.held:
        children.ask("produce", "noop", load.held)
        stack.enter_context(Crowd(server.url, TTL, 1, load.held))
    if load.workers:
        stack.enter_context(Crowd(server.url, TTL, load.workers))
    if load.delayed:
        children.ask("delayed", "noop", 0, 1.0, load.delayed)


def _server_share(server: Server, seconds: float) -> float:
    """The share of one core that the server uses in that time."""
    began, used = time.monotonic(), _cpu_seconds(server)
    time.sleep(seconds)
    return (_cpu_seconds(server) - used) / (time.monotonic() - began)


def _cpu_seconds(server: Server) -> float:
    told = server.client.info("cpu")
    return float(told["used_cpu_user"]) + float(told["used_cpu_sys"])


def measure_takeover(side: Side, folder: Path, held: int) -> dict[str, float]:
    """What a dead worker held is run by another: when that begins after the death, and how fast it goes."""
    with Server() as server:
        queue = Queue(side, folder, server, ttl=TAKEOVER_TTL)
        queue.fill(held)
        with Crowd(server.url, TAKEOVER_TTL, 1, held) as dead, queue.worker() as worker:
            time.sleep(2 * TAKEOVER_TTL)  # the worker has watched for a TTL
            died = time.monotonic()
            dead.kill()
            _, ended = queue.await_left(worker)
        first = queue.first_start()
    return {"first_after_s": first - died, "per_s": held / (ended - first), "ttl_s": TAKEOVER_TTL}
