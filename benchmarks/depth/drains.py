"""Drains of all or a part of what is queued, over any wire; the driver watches over a wire of its own."""

from __future__ import annotations

import mmap
import time
from pathlib import Path

from benchmarks import slots
from benchmarks.measure import POLL
from benchmarks.processes import Children, SideFailed, Worker
from benchmarks.servers import Server
from benchmarks.sides import Side

PATIENCE = 300.0
STARTS_LOOKED_AT = 2000  # a drain's first start is among these: tasks are fetched in order


class Queue:
    """One side's queue on one server: ``fill`` it, then ``drain`` it with one worker.

    Args:
        worker_url: the worker's way to the server, where it is another than the producer's.
        ttl: ours: the liveness TTL.
        held: entries in the queue that are nobody's to drain.
    """

    def __init__(
        self,
        side: Side,
        folder: Path,
        server: Server,
        worker_url: str | None = None,
        ttl: float | None = None,
        held: int = 0,
    ) -> None:
        self._side = side
        self._server = server
        self._slots = folder / f"{side.name}.slots"
        self._held = held
        plan = side.plan("drain")
        self._producer = Children(side, folder, server.url, self._slots, plan, results=False, ttl=ttl)
        url = worker_url or server.url
        self._workers = Children(side, folder, url, self._slots, plan, results=False, ttl=ttl)
        self._marks: mmap.mmap | None = None
        self._count = 0

    def fill(self, count: int) -> None:
        """Queue so many no-ops."""
        self.expect(count)
        self._producer.ask("produce", "noop", count)

    def expect(self, count: int) -> None:
        """Make room for the marks of so many tasks, which are queued in another way."""
        self._marks = slots.create(self._slots, count)
        self._count = count

    def worker(self) -> Worker:
        """Start a worker."""
        return self._workers.worker()

    def drain(self, count: int | None = None) -> float:
        """Start a worker, wait until it has settled so many (all by default), kill it; tasks a second.

        From the first start until the queue's own keys show that they are settled; for a whole drain until every task
        has ended, too. Raises SideFailed.
        """
        left_at_end = 0 if count is None else self._count - count
        with self.worker() as worker:
            left, ended_at = self.await_left(worker, left_at_end)
        return (self._count - left) / (ended_at - self.first_start())

    def await_left(self, worker: Worker, left_at_end: int = 0) -> tuple[int, float]:
        """Wait until no more than this is left to settle; returns what is left then, and when (monotonic)."""
        marks = self._marks
        assert marks is not None
        give_up_at = time.monotonic() + PATIENCE
        ended = 0
        while True:
            left = self._side.pending(self._server.client) - self._held
            now = time.monotonic()
            if left <= left_at_end:
                # Where a task leaves the queue before it has run (huey), its end counts.
                ended = self._count if left_at_end else slots.ended_up_to(marks, ended, self._count)
                if ended == self._count:
                    return left, now
            if now > give_up_at:
                raise SideFailed(f"not drained in {PATIENCE:.0f} s: {left} left of {self._count}")
            worker.check()
            time.sleep(POLL)

    def first_start(self) -> float:
        """When the first task started (monotonic)."""
        assert self._marks is not None
        looked_at = (slots.read(self._marks, task) for task in range(min(self._count, STARTS_LOOKED_AT)))
        return min(slot.first_start for slot in looked_at if slot.starts)

    def started(self, count: int) -> list[float]:
        """When each of the first so many tasks started first; 0 for one that has not."""
        assert self._marks is not None
        return [slots.read(self._marks, task).first_start for task in range(count)]


def drain_rate(side: Side, folder: Path, backlog: int, count: int | None = None) -> float:
    """Tasks a second for the first ``count`` (all by default) of a backlog, on a server of its own."""
    with Server() as server:
        queue = Queue(side, folder, server)
        queue.fill(backlog)
        return queue.drain(count)
