"""Gathering single deliveries into batches: full, or as old as the oldest may get."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from taskmesh.tasks import Batch
from taskmesh.worker.deliveries import Delivery


class Batcher:
    """Gathers for one task; ``start`` is given each batch, and says whether there was a slot for it."""

    def __init__(self, batch: Batch, start: Callable[[list[Delivery]], bool]) -> None:
        self._batch = batch
        self._start = start
        self._gathered: deque[Delivery] = deque()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> int:
        return len(self._gathered)

    def add(self, delivery: Delivery) -> None:
        self._gathered.append(delivery)
        if len(self._gathered) >= self._batch.max_rows:
            self.flush()
        elif self._timer is None:
            wait = delivery.arrived + self._batch.max_wait - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._due)

    def _due(self) -> None:
        self._timer = None
        self.flush()

    def flush(self) -> None:
        """Start what is full or due, as far as there are slots."""
        now = time.monotonic()
        while self._gathered:
            full = len(self._gathered) >= self._batch.max_rows
            if not full and now < self._gathered[0].arrived + self._batch.max_wait:
                break
            rows = [self._gathered[place] for place in range(min(len(self._gathered), self._batch.max_rows))]
            if not self._start(rows):
                return  # a slot that frees flushes again
            for _ in rows:
                self._gathered.popleft()
        if self._gathered and self._timer is None:
            wait = self._gathered[0].arrived + self._batch.max_wait - now
            self._timer = asyncio.get_running_loop().call_later(max(0.0, wait), self._due)

    def remove(self, delivery: Delivery) -> bool:
        if delivery not in self._gathered:
            return False
        self._gathered.remove(delivery)
        return True

    def take(self) -> list[Delivery]:
        """Everything that has not started."""
        taken = list(self._gathered)
        self._gathered.clear()
        return taken
