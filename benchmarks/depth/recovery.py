"""Workers killed at random moments: how long after the kill each of their tasks starts again in another worker.

Two workers stay; victims run beside them, die within a TTL of each other, and are replaced when all is over.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from benchmarks.depth.app import environment, make_mesh
from benchmarks.depth.programs import Heartbeat, start_worker
from benchmarks.depth.restarts import Process, Restarts, find_restarts
from benchmarks.measure import percentile
from benchmarks.processes import SideFailed
from benchmarks.servers import Server

STAYING = 2
VICTIMS = 3
NAP = 0.5
NAPS_PER_S = 60
CONCURRENCY = 100
START_LIMIT = 30.0
RESTART_LIMIT = 30.0  # beyond the TTL; only what never comes takes so long
ALLOWED_BEYOND_TTL = 0.2


class Fleet:
    """The workers of one run, on one server."""

    def __init__(self, url: str, ttl: float, heartbeat: Heartbeat, folder: Path) -> None:
        self._url = url
        self._ttl = ttl
        self._heartbeat = heartbeat
        self._folder = folder
        self.all: list[Process] = []

    def start(self, number: int) -> list[Process]:
        """So many more workers."""
        started = []
        for _ in range(number):
            journal = self._folder / f"{len(self.all)}.journal"
            told = environment(self._url, self._ttl, journal=journal)
            started.append(Process(start_worker(told, self._heartbeat, CONCURRENCY), journal))
            self.all.append(started[-1])
        return started

    async def await_busy(self, workers: Iterable[Process]) -> None:
        """Until each of them has started a task."""
        give_up_at = time.monotonic() + START_LIMIT
        for worker in workers:
            while not worker.marks():
                if time.monotonic() > give_up_at or worker.process.poll() is not None:
                    raise SideFailed("a worker did not start any task")
                await asyncio.sleep(0.02)

    async def await_restarts(self, limit: float) -> None:
        """Until everything that the dead were running has started elsewhere; SideFailed after ``limit`` seconds."""
        give_up_at = time.monotonic() + limit
        while missing := find_restarts(self.all).missing:
            if time.monotonic() > give_up_at:
                raise SideFailed(f"tasks of killed workers did not start again: {missing}")
            await asyncio.sleep(0.1)

    def kill(self, worker: Process) -> None:
        """SIGKILL to the worker; its heartbeat's process must find out by itself."""
        worker.killed = time.monotonic()
        worker.process.kill()
        worker.process.wait()

    def end(self) -> None:
        for worker in self.all:
            worker.process.kill()
            worker.process.wait()


async def _feed(url: str, ttl: float, submitted: Iterator[int], stop: asyncio.Event) -> None:
    async with make_mesh(environment(url, ttl)) as mesh:
        nap = mesh.get_task("nap")
        while not stop.is_set():
            await nap.submit(next(submitted), NAP * random.uniform(0.5, 1.5))
            await asyncio.sleep(1 / NAPS_PER_S)


async def _kill_one(fleet: Fleet, victim: Process, ttl: float) -> None:
    await asyncio.sleep(random.uniform(0, ttl))
    fleet.kill(victim)


async def _kill_all(fleet: Fleet, ttl: float, kills: int) -> None:
    staying = fleet.start(STAYING)
    await fleet.await_busy(staying)
    while kills > 0:
        victims = fleet.start(min(VICTIMS, kills))
        await fleet.await_busy([*staying, *victims])
        await asyncio.gather(*(_kill_one(fleet, victim, ttl) for victim in victims))
        await fleet.await_restarts(ttl + RESTART_LIMIT)
        kills -= len(victims)


async def _run(server: Server, ttl: float, kills: int, heartbeat: Heartbeat, folder: Path) -> Restarts:
    fleet = Fleet(server.url, ttl, heartbeat, folder)
    stop = asyncio.Event()
    feeding = asyncio.create_task(_feed(server.url, ttl, count(), stop))
    try:
        await _kill_all(fleet, ttl, kills)
    finally:
        stop.set()
        await asyncio.gather(feeding, return_exceptions=True)
        fleet.end()
    feeding.result()
    return find_restarts(fleet.all)


def measure_recovery(ttl: float, kills: int, heartbeat: Heartbeat = "process") -> dict[str, Any]:
    """Percentiles of the restarts after so many kills, in seconds, and how many were within the TTL + 0.2 s."""
    with Server() as server, tempfile.TemporaryDirectory(prefix="bench-kills-") as folder:
        found = asyncio.run(_run(server, ttl, kills, heartbeat, Path(folder)))
    if not found.first:
        raise SideFailed("no killed worker had a task in hand")
    limit = ttl + ALLOWED_BEYOND_TTL
    return {
        "p50": percentile(found.first, 0.5),
        "p99": percentile(found.first, 0.99),
        "max": max(found.first),
        "ttl_s": ttl,
        "limit_s": limit,
        "share_within_limit": sum(one <= limit for one in found.first) / len(found.first),
        "kills": kills,
        "tasks": len(found.first),
        "died_twice": len(found.again),
        "died_twice_max": max(found.again, default=None),
        "robbed": found.robbed,
    }
