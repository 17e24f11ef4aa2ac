"""How many deliveries are welcome: the free slots, and a little measured work ahead of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from taskmesh.settings import WorkerSettings
from taskmesh.tasks import Registry
from taskmesh.worker.deliveries import Source
from taskmesh.worker.execute import Executor
from taskmesh.worker.pace import Pace

BATCHES_AHEAD = 2
LONG_WIRE = 0.002  # seconds: about as long as a fetch of no-ops lasts


class Room:
    """One worker's room, which its partitions share.

    What is asked for is kept free until it is there, so that several fetchers do not fill the same slots.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        registry: Registry,
        executor: Executor,
        pace: Pace,
        settings: WorkerSettings,
    ) -> None:
        self._sources = sources
        self._executor = executor
        self._pace = pace
        self._most = settings.max_fetch
        self._rows = {source: _rows_per_slot(registry, source.queue) for source in sources}
        self._limits = {source: _most_in_hand(registry, source.queue) for source in sources}
        self._isolation = {source: _share_in_processes(registry, source.queue) for source in sources}
        self._asked = 0
        self._closed = False
        self._changed = asyncio.Event()

    def of(self, source: Source) -> int:
        """Deliveries of a partition that are welcome now."""
        if self._closed:
            return 0
        free, isolation = self._executor.free, self._isolation[source]
        if isolation:
            if self._executor.isolated.is_crowded:
                return 0
            if isolation == 1:
                free = min(free, self._executor.isolated.free)
        if free > 0:
            free = max(free, min(free, BATCHES_AHEAD) * self._rows[source])
        ahead = min(self._pace.ahead, self._stock(source))
        room = min(free + ahead, self._most) - self._asked
        limit = self._limits[source]
        if limit is not None:
            return max(0, min(room, limit - self._in_hand(source.queue)))
        # While a stock lies here, one fetch for a good part of it, not one for every slot that frees.
        return room if room >= ahead // 4 else 0

    def _in_hand(self, queue: str) -> int:
        return sum(source.in_hand for source in self._sources if source.queue == queue)

    def _stock(self, source: Source) -> int:
        """What may lie here at most: one fetch, and up to another to work at while the next is on its way.

        No more of it than the wire asks for: the more lies here, the less of it the processor's caches hold.
        """
        return int(self._most * (1 + min(1.0, source.round_trip / LONG_WIRE)))

    @contextlib.contextmanager
    def asking(self, count: int) -> Iterator[None]:
        """While it lasts, so many deliveries may be on their way: the other partitions leave room for them."""
        self._asked += count
        try:
            yield
        finally:
            self._asked -= count
            if count:
                self.changed()

    async def wait_for(self, source: Source) -> None:
        """Return when there may be room for a partition, or somebody wants it to be looked at."""
        self._changed.clear()
        if self.of(source) < 1 and not self._closed:
            await self._changed.wait()

    def changed(self) -> None:
        """There may be more than there was."""
        if not self._changed.is_set() and any(self.of(source) for source in self._sources):
            self._changed.set()

    def wake(self) -> None:
        """Whoever waits is to look again, room or not."""
        self._changed.set()

    def close(self) -> None:
        """Nothing is welcome any more."""
        self._closed = True
        self.wake()


def _rows_per_slot(registry: Registry, queue: str) -> int:
    """How many deliveries of a queue fit into one slot: a batch where all its tasks gather batches."""
    batches = [task.options.batch for task in registry if task.options.queue == queue]
    return min((batch.max_rows if batch else 1 for batch in batches), default=1)


def _most_in_hand(registry: Registry, queue: str) -> int | None:
    """How many deliveries of a queue the worker may have in hand; None for as many as there is room for."""
    limits = [task.options.in_hand for task in registry if task.options.queue == queue]
    return min((limit for limit in limits if limit is not None), default=None)


def _share_in_processes(registry: Registry, queue: str) -> float:
    """The share of a queue's tasks that run in processes."""
    choices = [bool(task.options.process) for task in registry if task.options.queue == queue]
    return sum(choices) / len(choices) if choices else 0.0
