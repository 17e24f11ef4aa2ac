"""A worker: starts, serves, drains, stops.

The order of a stop: fetching ends; what has not started is handed back; handlers finish, or are cancelled and
handed back; everything is settled; what others need of it is left to them; the worker leaves its queues; last of all
the heartbeat ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from functools import partial

from taskmesh.broker.scripts import FETCH, SETTLE
from taskmesh.broker.streams import CONTROL_LENGTH, Partition
from taskmesh.errors import BrokerError
from taskmesh.events import Observer, Observers, WorkerLost
from taskmesh.keys import RETURNED
from taskmesh.messages import Entry
from taskmesh.settings import MeshSettings, WorkerSettings, cpu_count
from taskmesh.tasks import Middleware, Registry
from taskmesh.worker import calls, drive, endings, execute, middleware
from taskmesh.worker.calls import Calls
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.endings import Endings
from taskmesh.worker.execute import Executor
from taskmesh.worker.fetch import Fetcher
from taskmesh.worker.intake import Intake
from taskmesh.worker.isolate import Isolated
from taskmesh.worker.membership import Membership
from taskmesh.worker.pace import Pace
from taskmesh.worker.processes import Processes
from taskmesh.worker.room import Room
from taskmesh.worker.settle import Settler
from taskmesh.worker.upkeep import Upkeep

log = logging.getLogger("taskmesh.worker")
TICK = 0.1
_ENGINE_FILES = (calls.__file__, drive.__file__, execute.__file__, middleware.__file__, endings.__file__)


class Worker:
    """Serves partitions with the tasks of a registry. ``start`` it, and ``stop`` it."""

    def __init__(
        self,
        partitions: Sequence[Partition],
        registry: Registry,
        mesh_settings: MeshSettings,
        settings: WorkerSettings,
        observers: Observers,
        middlewares: Sequence[Middleware] = (),
    ) -> None:
        self._mesh_settings = mesh_settings
        self._settings = settings
        self._observers = Observers([observers])
        self._sources = [Source(partition, mesh_settings.liveness_ttl) for partition in partitions]
        self._endings = Endings(mesh_settings, _ENGINE_FILES)
        self._calls = Calls(list(middlewares), settings.concurrency)
        processes = Processes(list(registry), mesh_settings, settings.processes or cpu_count())
        isolated = Isolated(processes, self._endings, lambda each: self._intake.set_aside([each]))
        self._executor = Executor(
            settings, self._endings, self._calls, isolated, lambda: self._room.changed()
        )
        self._intake = Intake(
            registry, self._endings, self._executor, self._observers, self._hand_back, processes
        )
        self._pace = Pace(settings.fetch_ahead, settings.concurrency)
        self._room = Room(self._sources, registry, self._executor, self._pace, settings)
        self._membership = Membership(
            self._sources, registry, mesh_settings, settings, self._slack, self._lost
        )
        self._leaving = registry.leaving
        self._settlers: dict[Source, Settler] = {}
        self._fetchers: dict[Source, Fetcher] = {}
        self._upkeeps: dict[Source, Upkeep] = {}
        self._fetching: list[asyncio.Task[None]] = []
        self._loops: list[asyncio.Task[None]] = []
        self._progress = time.monotonic()
        self._stopping = False
        self._stopped = asyncio.Event()

    @property
    def worker(self) -> bytes:
        """The name of its present incarnation; where it was struck off in one partition, the newest."""
        return self._membership.name

    # life

    async def start(self) -> None:
        """Enter the queues and begin to serve them.

        Raises:
            BrokerError: the server cannot be reached or refuses.
        """
        try:
            await self._enter()
            await self._membership.keep_lease()
        except BaseException:
            await self.stop(0.0)  # it may have entered some of the queues
            raise
        self._serve()

    async def _enter(self) -> None:
        for source in self._sources:
            await self._membership.enter(source)
            await source.partition.caller.load(source.keys.tag, [FETCH, SETTLE])
            upkeep = Upkeep(source, self, self._room, self._mesh_settings.liveness_ttl, self._observers)
            settler = Settler(
                source, self._observers, self._pace, upkeep.poke_promoter, partial(self.adopt, source)
            )
            self._upkeeps[source] = upkeep
            self._settlers[source] = settler
            self._endings.serve(source, settler)
            self._fetchers[source] = Fetcher(
                source, self, self._room, self._mesh_settings.liveness_ttl / 2, len(self._sources)
            )

    def _serve(self) -> None:
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
        self._membership.close()
        self._room.close()
        try:
            await self._drain_and_leave(timeout)
        finally:
            self._stopped.set()

    async def _drain_and_leave(self, timeout: float | None) -> None:
        give_up_after = self._settings.drain_timeout if timeout is None else timeout
        give_up_at = time.monotonic() + give_up_after
        await self._stop_fetching()
        self._intake.stop_downloads()
        await self._hand_back(self._executor.take_waiting())
        await self._executor.drain(give_up_at - time.monotonic())
        try:
            async with asyncio.timeout(max(2.0, give_up_at - time.monotonic())):
                await self._endings.drained()
        except TimeoutError:
            log.error("the server is away: outcomes that it has not heard of are left to the next worker")
        await self._leave_things(give_up_at - time.monotonic())
        self._endings.close()
        await _end(self._background())
        for source in self._sources:
            try:
                await self._hand_back_rest(source)
                await source.partition.leave(source.worker)
            except BrokerError as error:
                log.warning("queue %s: leaving: %s", source.queue, error)
        await self._membership.stop()
        log.info("worker %s has stopped", self.worker.decode())

    async def _leave_things(self, patience: float) -> None:
        """What handlers keep in this process, others may need; they do it, within the time of the drain."""
        try:
            async with asyncio.timeout(max(2.0, patience)):
                for leave in self._leaving:
                    await leave()
        except Exception as error:
            log.warning("not all that others need is left to them: %s: %s", type(error).__name__, error)

    def abandon(self) -> None:
        """End without a word, as if the process had been killed: nothing is finished, settled or handed back.

        The lease runs out, and others take the work over. Handlers in threads run on; their results are dropped.
        """
        self._stopping = True
        self._stopped.set()
        self._membership.abandon()
        self._room.close()
        self._executor.abandon()
        self._endings.close()
        for task in self._background():
            task.cancel()

    def watch_with(self, middleware: Middleware, observer: Observer) -> None:
        """Add an innermost middleware and an observer to this worker alone. For tests."""
        self._calls.add_middleware(middleware)
        self._observers.add(observer)

    def _background(self) -> list[asyncio.Task[None]]:
        return [*self._fetching, *self._loops, *self._intake.tasks, *self._membership.tasks]

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

    def take_in(self, source: Source, entries: Sequence[Entry], now_ms: int) -> None:
        """Deliveries, as of that Redis time."""
        self._intake.take_in(source, entries, now_ms)

    @property
    def room_for_suspects(self) -> int:
        """How many messages that two workers died with are welcome now."""
        return self._intake.room_for_suspects

    def control(self, source: Source, entries: Sequence[tuple[bytes, list[bytes]]]) -> None:
        """What others said on the control stream."""
        if len(entries) >= CONTROL_LENGTH:
            self._upkeeps[source].read_marks()
        for entry_id, (kind, value, *_) in entries:
            if _later(entry_id, source.last_control):
                source.last_control = entry_id
            if kind == b"cancel":
                self._intake.cancel(source, [value.decode("ascii", "replace")])
            elif kind == b"requeued":
                source.cancelled.pop(value.decode("ascii", "replace"), None)
            elif kind == b"due":
                self._upkeeps[source].poke_promoter()
            elif kind == b"returned":
                self._upkeeps[source].poke_observer()
            elif kind == b"given" and value == source.worker:
                self.adopt(source)

    def cancel(self, source: Source, message_ids: Sequence[str]) -> None:
        """Someone wants these messages cancelled."""
        self._intake.cancel(source, message_ids)

    def adopt(self, source: Source) -> None:
        """The server may hold entries for this worker that it does not know of."""
        self._fetchers[source].adopt()
        self._room.wake()

    async def rejoin(self, source: Source) -> None:
        """The stream or the lease is gone: enter the queue again."""
        await self._membership.enter(source)

    # giving back

    async def _hand_back_rest(self, source: Source) -> None:
        """At the end: whatever the server still holds for this worker, whether it was ever seen here or not."""
        pending = await source.partition.own_pending(source.worker)
        entries = [(lane, entry_id) for lane, entry_id, _ in pending]
        for first in range(0, len(entries), 500):
            await source.partition.hand_back(source.worker, entries[first : first + 500])

    async def _hand_back(self, deliveries: Sequence[Delivery], to: bytes = RETURNED) -> None:
        for source in self._sources:
            mine = [delivery for delivery in deliveries if delivery.source is source]
            if mine:
                async with source.accounts:
                    await self._hand_back_to(source, mine, to)

    async def _hand_back_to(self, source: Source, mine: Sequence[Delivery], to: bytes) -> None:
        entries = [(delivery.lane, delivery.entry) for delivery in mine]
        try:
            for first in range(0, len(entries), 500):
                await source.partition.hand_back(source.worker, entries[first : first + 500], to)
        except BrokerError as error:
            log.warning("queue %s: handing back: %s", source.queue, error)
            self.adopt(source)
        for delivery in mine:
            held = source.held[delivery.lane]
            if held.get(delivery.entry) is delivery:  # it may have been given back to this worker meanwhile
                del held[delivery.entry]

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
            patience = self._settings.hand_back_after
            await self._hand_back(self._executor.isolated.take_excess(self._progress, patience))
            await asyncio.sleep(TICK)

    # liveness

    def _slack(self) -> float | None:
        """Seconds for which the event loop may go on being blocked; None without a limit. Any thread."""
        started, limit = self._executor.current or (0.0, self._executor.longest_timeout())
        if limit is None:
            return None
        return limit - (time.monotonic() - max(started, self._progress))

    def _lost(self, source: Source, old: bytes) -> None:
        """Struck off in a partition: what has not started there is others' now."""
        self._observers.emit(WorkerLost(old.decode()))
        for delivery in self._executor.take_waiting():
            if delivery.source is not source:
                self._executor.accept(delivery)
        for lane in source.held:
            lane.clear()
        self._executor.dispatch()


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _later(a: bytes, b: bytes) -> bool:
    def key(entry_id: bytes) -> tuple[int, int]:
        ms, _, sequence = entry_id.partition(b"-")
        return int(ms), int(sequence)

    return key(a) > key(b)
