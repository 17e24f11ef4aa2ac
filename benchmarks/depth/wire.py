"""Drains over a longer wire: ours and the peers', through the delaying proxy."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.depth.delay import Delay
from benchmarks.depth.drains import Queue
from benchmarks.servers import Server
from benchmarks.sides import Side

CALIBRATE_WITH = 400
PINGS = 200
BULK_BYTES = 32 * 2**20
BULK_TIMES = 5
ROUND_TRIP = 0.002
MOST = 2_000_000


@dataclass(frozen=True)
class Wire:
    """What the proxy itself does to a plain client."""

    ping_p50_s: float
    mb_per_s: float


def port_of(server: Server) -> int:
    """The port that a server listens on."""
    return int(server.url.rpartition(":")[2].partition("/")[0])


def measure_wire(round_trip: float) -> Wire:
    """The round trip of a PING through the proxy, and how much passes it in a second."""
    with (
        Server() as server,
        Delay(port_of(server), round_trip / 2) as delay,
        redis.Redis.from_url(delay.url) as client,
    ):
        samples = [_seconds_of(client.ping) for _ in range(PINGS)]
        client.set("bulk", bytes(BULK_BYTES))
        fastest = min(_seconds_of(lambda: client.get("bulk")) for _ in range(BULK_TIMES))
    return Wire(statistics.median(samples), BULK_BYTES / 1e6 / fastest)


def _seconds_of(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def drain_through(side: Side, folder: Path, count: int, round_trip: float | None) -> float:
    """Tasks a second, the worker's every connection through a proxy with that round trip (None: without a proxy)."""
    with Server() as server:
        if round_trip is None:
            return _fill_and_drain(Queue(side, folder, server), count)
        with Delay(port_of(server), round_trip / 2) as delay:
            return _fill_and_drain(Queue(side, folder, server, delay.url), count)


def _fill_and_drain(queue: Queue, count: int) -> float:
    queue.fill(count)
    return queue.drain()


def calibrate(side: Side, folder: Path, seconds: float) -> int:
    """How many tasks fill the time at a round trip of 2 ms."""
    count = CALIBRATE_WITH
    while True:
        rate = drain_through(side, folder, count, ROUND_TRIP)
        if count / rate >= seconds / 4 or count == MOST:
            return min(MOST, math.ceil(rate * seconds))
        count = min(MOST, math.ceil(count * min(10.0, seconds / 2 * rate / count)))
