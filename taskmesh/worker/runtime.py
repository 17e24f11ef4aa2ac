"""A worker: starts, serves, drains, stops.

The order of a stop: fetching ends; what has not started is handed back; handlers finish, or are cancelled and
handed back; everything is settled; the worker leaves its queues; last of all the heartbeat ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence

from taskmesh.broker.scripts import FETCH, SETTLE
from taskmesh.broker.streams import CONTROL_LENGTH, Partition
from taskmesh.errors import BrokerError
from taskmesh.events import Observer, Observers, WorkerLost
from taskmesh.keys import RETURNED
from taskmesh.messages import Entry
from taskmesh.settings import MeshSettings, WorkerSettings
from taskmesh.tasks import Middleware, Registry
from taskmesh.worker import calls, drive, endings, execute, middleware
from taskmesh.worker.calls import Calls
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.endings import Endings
from taskmesh.worker.execute import Executor
from taskmesh.worker.fetch import Fetcher
from taskmesh.worker.heartbeat import Heartbeat
from taskmesh.worker.intake import Intake
from taskmesh.worker.pace import Pace
from taskmesh.worker.settle import Settler
from taskmesh.worker.upkeep import Upkeep

log = logging.getLogger("taskmesh.worker")
TICK = 0.1
BATCHES_AHEAD = 2
_ENGINE_FILES = (calls.__file__, drive.__file__, execute.__file__, middleware.__file__, endings.__file__)


def new_worker_name() -> bytes:
    """An incarnation's name; never used again."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}".encode()


class Worker:
    """Serves partitions with the tasks of a registry. ``start`` it, and ``stop`` it.

    Attributes:
        worker: the name of this incarnation.
    """

    def __init__(
        self,
        partitions: Sequence[Partition],
        registry: Registry,
        mesh_settings: MeshSettings,
        settings: WorkerSettings,
        observers: Observers,
        middlewares: Sequence[Middleware] = (),
    ) -> None:
        self.worker = new_worker_name()
        self._registry = registry
        self._mesh_settings = mesh_settings
        self._settings = settings
        self._observers = Observers([observers])
        self._sources = [Source(partition) for partition in partitions]
        self._endings = Endings(mesh_settings, _ENGINE_FILES)
        self._calls = Calls(list(middlewares), settings.concurrency, lambda: self.worker.decode())
        self._executor = Executor(settings, self._endings, self._calls, self._room_changed)
        self._intake = Intake(registry, self._endings, self._executor, self._observers, self._hand_back)
        self._pace = Pace(settings.fetch_ahead, settings.max_fetch)
        self._rows = {source: self._rows_per_slot(source.queue) for source in self._sources}
        self._settlers: dict[Source, Settler] = {}
        self._fetchers: dict[Source, Fetcher] = {}
        self._upkeeps: dict[Source, Upkeep] = {}
        self._fetching: list[asyncio.Task[None]] = []
        self._loops: list[asyncio.Task[None]] = []
        self._rejoining: dict[Source, asyncio.Task[None]] = {}
        self._room = asyncio.Event()
        self._progress = time.monotonic()
        self._heartbeat: Heartbeat | None = None
        self._stopping = False
        self._stopped = asyncio.Event()

    # life

    async def start(self) -> None:
        """Enter the queues and begin to serve them.

        Raises:
            BrokerError: the server cannot be reached or refuses.
        """
        try:
            await self._enter()
        except BaseException:
            await self.stop(0.0)  # it may have entered some of the queues
            raise
        self._serve()

    async def _enter(self) -> None:
        for source in self._sources:
            await self._join(source)
            await source.partition.caller.load(source.keys.tag, [FETCH, SETTLE])
            upkeep = Upkeep(source, self, self._mesh_settings.liveness_ttl, self._observers)
            settler = Settler(source, self.worker, self._observers, self._pace, upkeep.poke_promoter)
            self._upkeeps[source] = upkeep
            self._settlers[source] = settler
            self._endings.serve(source, settler)
            self._fetchers[source] = Fetcher(source, self, self._mesh_settings.liveness_ttl / 2)

    def _serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._heartbeat = Heartbeat(
            self._sources,
            self._mesh_settings.liveness_ttl,
            lambda: self.worker,
            lambda source: loop.call_soon_threadsafe(self._struck_off, source),
            self._overrun,
            self._settings.loop_grace,
        )
        self._heartbeat.start()
        for source in self._sources:
            upkeep = self._upkeeps[source]
            self._fetching.append(asyncio.create_task(self._fetchers[source].run(), name="taskmesh fetch"))
            self._loops += [
                asyncio.create_task(upkeep.watch(), name="taskmesh watch"),
                asyncio.create_task(upkeep.promote(), name="taskmesh promote"),
                asyncio.create_task(upkeep.listen(), name="taskmesh listen"),
            ]
        self._loops.append(asyncio.create_task(self._tick(), name="taskmesh tick"))
        log.info("worker %s serves %s", self.worker.decode(), ", ".join(s.queue for s in self._sources))

    async def stop(self, timeout: float | None = None) -> None:
        """Drain and leave: what runs may finish within ``timeout`` seconds, the rest is handed back, uncounted.

        A second call waits for the first, whatever its ``timeout``.
        """
        if self._stopping:
            await self._stopped.wait()
            return
        self._stopping = True
        try:
            await self._drain_and_leave(timeout)
        finally:
            self._stopped.set()

    async def _drain_and_leave(self, timeout: float | None) -> None:
        give_up_after = self._settings.drain_timeout if timeout is None else timeout
        give_up_at = time.monotonic() + give_up_after
        self._room.set()
        await self._stop_fetching()
        self._intake.stop_downloads()
        await self._hand_back(self._executor.take_waiting())
        await self._executor.drain(give_up_at - time.monotonic())
        try:
            async with asyncio.timeout(max(2.0, give_up_at - time.monotonic())):
                await self._endings.drained()
        except TimeoutError:
            log.error("the server is away: outcomes that it has not heard of are left to the next worker")
        self._endings.close()
        await _end(self._background())
        for source in self._sources:
            try:
                await self._hand_back_rest(source)
                await source.partition.leave(self.worker)
            except BrokerError as error:
                log.warning("queue %s: leaving: %s", source.queue, error)
        if self._heartbeat is not None:
            await asyncio.to_thread(self._heartbeat.stop)
        log.info("worker %s has stopped", self.worker.decode())

    def abandon(self) -> None:
        """End without a word, as if the process had been killed: nothing is finished, settled or handed back.

        The lease runs out, and others take the work over. Handlers in threads run on; their results are dropped.
        """
        self._stopping = True
        self._stopped.set()
        if self._heartbeat is not None:
            self._heartbeat.end()
        self._executor.abandon()
        self._endings.close()
        for task in self._background():
            task.cancel()

    def watch_with(self, middleware: Middleware, observer: Observer) -> None:
        """Add an innermost middleware and an observer to this worker alone. For tests."""
        self._calls.add_middleware(middleware)
        self._observers.add(observer)

    def _background(self) -> list[asyncio.Task[None]]:
        return [*self._fetching, *self._loops, *self._intake.tasks, *self._rejoining.values()]

    async def _stop_fetching(self) -> None:
        for fetcher in self._fetchers.values():
            fetcher.stop()
        left: set[asyncio.Task[None]] = set(self._fetching)
        tries = 0
        while left and tries < 100:
            # More than once: a fetch may be about to block when the first word reaches the server.
            await asyncio.gather(*(fetcher.unblock() for fetcher in self._fetchers.values()))
            _, left = await asyncio.wait(left, timeout=0.05)
            tries += 1

    async def __aenter__(self) -> Worker:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    # what the fetchers and the upkeep ask and bring

    def room(self, source: Source) -> int:
        """Deliveries of a partition that are welcome now."""
        if self._stopping:
            return 0
        free = self._executor.free
        if free > 0:
            free = max(free, min(free, BATCHES_AHEAD) * self._rows[source])
        ahead = self._pace.ahead
        room = min(free + ahead, self._settings.max_fetch)
        # While a stock lies here, one fetch for a good part of it, not one for every slot that frees.
        return room if room >= ahead // 4 else 0

    async def wait_for_room(self, source: Source) -> None:
        self._room.clear()
        if self.room(source) < 1 and not self._stopping:
            await self._room.wait()

    def _room_changed(self) -> None:
        if not self._room.is_set() and any(self.room(source) for source in self._sources):
            self._room.set()

    def take_in(self, source: Source, entries: Sequence[Entry], now_ms: int) -> None:
        """Deliveries, as of that Redis time."""
        self._intake.take_in(source, entries, now_ms)

    @property
    def has_suspect(self) -> bool:
        """Whether a message that two workers died with is in this worker's hands."""
        return self._intake.has_suspect

    def control(self, source: Source, entries: Sequence[tuple[bytes, list[bytes]]]) -> None:
        """What others said on the control stream."""
        if len(entries) >= CONTROL_LENGTH:
            self._upkeeps[source].read_marks()
        for entry_id, (kind, value) in entries:
            if _later(entry_id, source.last_control):
                source.last_control = entry_id
            if kind == b"cancel":
                self._intake.cancel(source, [value.decode()])
            elif kind == b"requeued":
                source.cancelled.pop(value.decode(), None)
            elif kind == b"due":
                self._upkeeps[source].poke_promoter()
            elif kind == b"returned":
                self._upkeeps[source].poke_observer()
            elif kind == b"given" and value == self.worker:
                self.adopt(source)

    def cancel(self, source: Source, message_ids: Sequence[str]) -> None:
        """Someone wants these messages cancelled."""
        self._intake.cancel(source, message_ids)

    def adopt(self, source: Source) -> None:
        """The server may hold entries for this worker that it does not know of."""
        self._fetchers[source].adopt()
        self._room.set()

    async def rejoin(self, source: Source) -> None:
        """The stream or the lease is gone: enter the queue again."""
        await self._join(source)

    async def _join(self, source: Source) -> None:
        joined = await source.partition.join(self.worker, [task.name for task in self._registry])
        source.last_control = joined.last_control
        source.mark(joined.cancelled)
        if joined.released:
            log.info("queue %s: released %d parked messages", source.queue, joined.released)

    def _rows_per_slot(self, queue: str) -> int:
        """How many deliveries of a queue fit into one slot: a batch where all its tasks gather batches."""
        batches = [task.options.batch for task in self._registry if task.options.queue == queue]
        return min((batch.max_rows if batch else 1 for batch in batches), default=1)

    # giving back

    async def _hand_back_rest(self, source: Source) -> None:
        """At the end: whatever the server still holds for this worker, whether it was ever seen here or not."""
        pending = await source.partition.own_pending(self.worker)
        entries = [(lane, entry_id) for lane, entry_id, _ in pending]
        for first in range(0, len(entries), 500):
            await source.partition.hand_back(self.worker, entries[first : first + 500])

    async def _hand_back(self, deliveries: Sequence[Delivery], to: bytes = RETURNED) -> None:
        for source in self._sources:
            entries = [(d.lane, d.entry) for d in deliveries if d.source is source]
            if not entries:
                continue
            try:
                for first in range(0, len(entries), 500):
                    await source.partition.hand_back(self.worker, entries[first : first + 500], to)
            except BrokerError as error:
                log.warning("queue %s: handing back: %s", source.queue, error)
                self.adopt(source)
            for lane, entry in entries:
                source.held[lane].pop(entry, None)

    async def _tick(self) -> None:
        while True:
            self._progress = time.monotonic()
            waited = self._executor.oldest_wait(self._progress)
            if (
                waited > self._settings.hand_back_after
                and self._executor.active >= self._settings.concurrency
            ):
                self._pace.stalled()
                waiting = self._executor.take_waiting()
                log.info("all slots are taken: %d deliveries go back to the others", len(waiting))
                await self._hand_back(waiting)
            await asyncio.sleep(TICK)

    # liveness

    def _overrun(self) -> float:
        """Seconds by which the event loop is blocked beyond what the running handlers may take. Any thread."""
        started, limit = self._executor.current or (0.0, self._executor.longest_timeout())
        if limit is None:
            return 0.0
        return max(0.0, time.monotonic() - max(started, self._progress) - limit)

    def _struck_off(self, source: Source) -> None:
        """Stopped for longer than the TTL: others have the work now. Take a new name and go on."""
        if self._stopping or source in self._rejoining:
            return
        old, self.worker = self.worker, new_worker_name()
        log.warning("worker %s was struck off; it goes on as %s", old.decode(), self.worker.decode())
        self._observers.emit(WorkerLost(old.decode()))
        self._executor.take_waiting()
        self._intake.stop_downloads()
        for each in self._sources:
            for lane in each.held:
                lane.clear()
            self._settlers[each].worker = self.worker
            task = asyncio.create_task(self._enter_again(each), name="taskmesh rejoin")
            self._rejoining[each] = task

    async def _enter_again(self, source: Source) -> None:
        try:
            await self._join(source)
        except BrokerError as error:
            log.warning("queue %s: entering again: %s", source.queue, error)
        finally:
            self._rejoining.pop(source, None)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _later(a: bytes, b: bytes) -> bool:
    def key(entry_id: bytes) -> tuple[int, int]:
        ms, _, sequence = entry_id.partition(b"-")
        return int(ms), int(sequence)

    return key(a) > key(b)
