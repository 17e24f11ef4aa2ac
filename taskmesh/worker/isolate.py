"""Deliveries that are run in processes: those that wait for one, and those that have one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from taskmesh.errors import ConfigurationError
from taskmesh.worker.deliveries import Delivery
from taskmesh.worker.endings import Endings
from taskmesh.worker.process_talk import Ended, NotLoaded
from taskmesh.worker.processes import ProcessDied, Processes
from taskmesh.worker.ready import Ready

log = logging.getLogger("taskmesh.worker")
STOCK = 2  # deliveries for each process that may wait here while others could have them


class Isolated:
    """The line before a worker's processes; ``next`` and ``run`` what it gives.

    Args:
        set_aside: takes a suspect message back that no process could load.
    """

    def __init__(
        self, processes: Processes, endings: Endings, set_aside: Callable[[Delivery], object]
    ) -> None:
        self._processes = processes
        self._endings = endings
        self._set_aside = set_aside
        self._ready = Ready()
        self._running = 0
        self.takes = processes.take
        self.add = self._ready.add
        self.remove = self._ready.remove
        self.take = self._ready.take

    def __len__(self) -> int:
        return len(self._ready)

    def __bool__(self) -> bool:
        return bool(self._ready)

    @property
    def free(self) -> int:
        """Processes that nothing runs in and nothing waits for; below 0 when more wait."""
        return self._processes.count - self._running - len(self._ready)

    @property
    def is_crowded(self) -> bool:
        """Whether so many wait that no more should be fetched."""
        return bool(self._ready) and len(self._ready) > STOCK * self._processes.count

    @property
    def room_for_suspects(self) -> int:
        """So many more messages that two workers died with may wait here: a death of this worker spares them."""
        return STOCK * self._processes.count + self.free

    def take_excess(self, now: float, patience: float) -> list[Delivery]:
        """What others should have: all beyond a small stock, once some have waited for so many seconds."""
        if not self.is_crowded or self._ready.oldest_wait(now) <= patience:
            return []
        waiting = self._ready.take()
        kept = STOCK * self._processes.count
        for delivery in waiting[:kept]:
            self._ready.add(delivery)
        return waiting[kept:]

    def next(self) -> Delivery | None:
        """The next delivery, if there is a process for it; the process is taken for it until ``run`` has ended."""
        if self._running >= self._processes.count:
            return None
        delivery = self._ready.next()
        if delivery is not None:
            self._running += 1
        return delivery

    async def run(self, delivery: Delivery, on_start: Callable[[], object]) -> None:
        """Run a delivery and end it, in a fresh process when one died with it, until that has happened too often.

        Cancelling this kills the process, and leaves the ending to the caller.

        Raises:
            Exception: its arguments do not fit.
            OSError: no process could be started.
        """
        deaths = delivery.deliveries - 1
        try:
            if not self._processes.take(delivery):  # given up while it waited here
                self._set_aside(delivery)
                return
            delivery.task.signature.convert(delivery.message.args, delivery.message.kwargs)
            while True:
                started = time.monotonic()

                def begin() -> None:
                    nonlocal started
                    started = time.monotonic()
                    on_start()

                try:
                    ended = await self._processes.run(delivery, self._endings.keeps_result(delivery), begin)
                except ProcessDied as death:
                    deaths += 1
                    log.warning("%s (%s): its process ended by %s", delivery.task, delivery.message.id, death)
                    if deaths >= delivery.task.options.max_deliveries:
                        text = f"{deaths} processes died with this message in hand, the last by {death}"
                        self._endings.died(delivery, text)
                        return
                else:
                    self._end(delivery, ended, time.monotonic() - started)
                    return
        finally:
            self._running -= 1
            if not self._ready and not self._processes.are_wanted:
                self._processes.end_idle()  # kept for what may never come again, they would only take memory

    def _end(self, delivery: Delivery, ended: Ended | NotLoaded, seconds: float) -> None:
        if isinstance(ended, NotLoaded):
            self._not_loaded(delivery, ended.reason)
        elif ended.succeeded:
            self._endings.succeeded_with(delivery, ended.outcome, seconds)
        else:
            self._endings.failed_with(delivery, ended.outcome, ended.delay, ended.reason, seconds)

    def _not_loaded(self, delivery: Delivery, reason: str) -> None:
        if delivery.task.options.process:
            self._endings.failed(delivery, ConfigurationError(reason), 0.0)
            return
        log.warning("%s; what workers died with runs in a worker instead", reason)
        self._processes.give_up(delivery.task)
        self._set_aside(delivery)

    def close(self) -> None:
        """End the processes, whatever they do."""
        self._processes.close()
