"""A worker's place in its queues: its names, its lease, and what follows when it has lost one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import socket
from collections.abc import Callable, Sequence

from taskmesh.broker.liveness import NO_ANSWER, STRUCK_OFF, Beat
from taskmesh.errors import BrokerError
from taskmesh.settings import MeshSettings, WorkerSettings
from taskmesh.tasks import Registry
from taskmesh.worker.deliveries import Source
from taskmesh.worker.heartbeat import Heartbeat, new_heartbeat
from taskmesh.worker.lease import Place
from taskmesh.worker.versions import abilities

log = logging.getLogger("taskmesh.worker")
FIRST_BEAT_LIMIT = 30.0


def new_worker_name() -> bytes:
    """An incarnation's name; never used again."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}".encode()


class Membership:
    """Of one worker, in all its partitions.

    Args:
        slack: seconds for which the event loop may go on being blocked; None without a limit. Called by any thread.
        on_lost: hears of a partition in which the worker was struck off, and of the name that it had there.

    Attributes:
        name: the worker's newest name.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        registry: Registry,
        mesh_settings: MeshSettings,
        settings: WorkerSettings,
        slack: Callable[[], float | None],
        on_lost: Callable[[Source, bytes], object],
    ) -> None:
        self.name = new_worker_name()
        self.slack = slack
        self._sources = sources
        self._registry = registry
        self._ttl = mesh_settings.liveness_ttl
        self._settings = settings
        self._on_lost = on_lost
        self._heartbeat: Heartbeat | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._without_beat = set(range(len(sources)))
        self._is_leased = asyncio.Event()
        self._entering: dict[Source, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is under way to enter queues again."""
        return list(self._entering.values())

    async def enter(self, source: Source) -> None:
        """Join a queue, for the first time or again.

        Raises:
            BrokerError: the server cannot be reached or refuses.
        """
        source.worker = source.worker or self.name
        able = abilities(self._registry, source.partition.wire_versions)
        joined = await source.partition.join(source.worker, able)
        source.last_control = joined.last_control
        source.mark(joined.cancelled)
        if joined.released:
            log.info("queue %s: released %d parked messages", source.queue, joined.released)

    async def keep_lease(self) -> None:
        """Start the heartbeat, and wait until it beats everywhere.

        A child process takes a second to come up on a busy machine. What was fetched before that would be held under
        a lease that nobody renews; without anything in hand, a worker that is struck off just takes a new name.
        """
        self._loop = asyncio.get_running_loop()
        self._heartbeat = new_heartbeat(
            self._settings.heartbeat,
            self._sources[0].partition.caller.server.url,
            [Place(source.keys.tag, source.keys.workers) for source in self._sources],
            self._ttl,
            self,
            self._settings.loop_grace,
        )
        self._heartbeat.start()
        try:
            async with asyncio.timeout(FIRST_BEAT_LIMIT):
                await self._is_leased.wait()
        except TimeoutError:
            log.warning(
                "no heartbeat has come through for %.0f s; the worker serves all the same", FIRST_BEAT_LIMIT
            )

    def close(self) -> None:
        """Enter nothing again; the lease goes on."""
        self._closed = True

    async def stop(self) -> None:
        """End the heartbeat."""
        if self._heartbeat is not None:
            await asyncio.to_thread(self._heartbeat.stop)

    def abandon(self) -> None:
        """Let the lease run out."""
        self.close()
        if self._heartbeat is not None:
            self._heartbeat.end()

    # what the heartbeat asks and says, from its own thread

    def name_in(self, number: int) -> bytes:
        source = self._sources[number]
        # A heartbeat that overtakes the entry would be told that the new name is not on the list.
        return b"" if source in self._entering else source.worker

    def offset_ms(self) -> int:
        return self._sources[0].partition.caller.clock.offset_ms

    def heard(self, number: int, beat: Beat) -> None:
        source = self._sources[number]
        source.steadiness.hear(beat)
        if beat.server_ms == STRUCK_OFF:
            if beat.worker == source.worker:
                self._tell(self._struck_off, source, beat.worker)
        elif beat.server_ms != NO_ANSWER and number in self._without_beat:
            self._without_beat.discard(number)
            if not self._without_beat:
                self._tell(self._is_leased.set)

    def _tell(self, what: Callable[..., object], *about: object) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the worker has ended
                self._loop.call_soon_threadsafe(what, *about)

    def _struck_off(self, source: Source, old: bytes) -> None:
        """Stopped for longer than the TTL: others have this partition's work now. Take a new name there and go on."""
        if self._closed or old != source.worker or source in self._entering:
            return
        self.name = source.worker = new_worker_name()
        log.warning(
            "queue %s: worker %s was struck off; it goes on as %s",
            *(source.queue, old.decode(), self.name.decode()),
        )
        self._on_lost(source, old)
        self._entering[source] = asyncio.create_task(self._enter_again(source), name="taskmesh rejoin")

    async def _enter_again(self, source: Source) -> None:
        try:
            await self.enter(source)
        except BrokerError as error:
            log.warning("queue %s: entering again: %s", source.queue, error)
        finally:
            del self._entering[source]
