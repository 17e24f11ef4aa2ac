"""What every worker does for its partition beside its own work: watch the others, promote what is due, listen."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from random import Random
from typing import Protocol

from taskmesh.broker.caller import pause_before
from taskmesh.broker.liveness import is_given_back, look, pause_between_looks
from taskmesh.errors import BrokerError
from taskmesh.events import Claimed, Observers
from taskmesh.keys import SUSPECTS
from taskmesh.messages import Entry
from taskmesh.worker.deliveries import Source
from taskmesh.worker.room import Room

log = logging.getLogger("taskmesh.worker")
_random = Random()  # not the module's: handlers may have seeded that one, and count on it
MAX_CLAIM = 500
MAX_PROMOTE = 500
LONGEST_NAP = 1.0
LISTEN_MS = 5000


class Host(Protocol):
    """The worker, as its upkeep sees it."""

    @property
    def room_for_suspects(self) -> int: ...

    def take_in(self, source: Source, entries: Sequence[Entry], now_ms: int) -> None: ...

    def control(self, source: Source, entries: Sequence[tuple[bytes, list[bytes]]]) -> None: ...

    def adopt(self, source: Source) -> None: ...

    def cancel(self, source: Source, message_ids: Sequence[str]) -> None: ...


class Upkeep:
    """The loops of one partition; ``poke_observer`` and ``poke_promoter`` make them look now."""

    def __init__(self, source: Source, host: Host, room: Room, ttl: float, observers: Observers) -> None:
        self._source = source
        self._host = host
        self._room = room
        self._observers = observers
        self._ttl = ttl
        self._pause = pause_between_looks(ttl, 1)
        self._sweep_at = time.monotonic() + ttl * _random.random()
        self._look_now = asyncio.Event()
        self._promote_now = asyncio.Event()
        self._marks_missed = False

    def poke_observer(self) -> None:
        self._look_now.set()

    def poke_promoter(self) -> None:
        self._promote_now.set()

    def read_marks(self) -> None:
        """Control entries may have been trimmed unread: ask for all that is to be cancelled."""
        self._marks_missed = True
        self._look_now.set()

    async def watch(self) -> None:
        """Look for dead workers and take their entries over, as far as there is room."""
        while True:
            await _nap(self._look_now, self._pause * _random.uniform(0.8, 1.0))
            try:
                if time.monotonic() >= self._sweep_at:
                    self._sweep_at = time.monotonic() + self._ttl
                    await self._source.partition.sweep()
                if self._marks_missed:
                    await self._read_marks()
                await self._look()
            except BrokerError as error:
                log.debug("queue %s: looking for dead workers: %s", self._source.queue, error)
                self._host.adopt(self._source)  # it may have claimed entries and not heard of it
                await asyncio.sleep(pause_before(3))

    async def _read_marks(self) -> None:
        self._marks_missed = False
        try:
            marks = await self._source.partition.cancel_marks()
        except BrokerError:
            self._marks_missed = True
            raise
        self._host.cancel(self._source, marks)

    async def _look(self) -> None:
        source, partition = self._source, self._source.partition
        found = await look(partition, self._ttl)
        is_steady = source.steadiness.is_steady(time.monotonic(), found.now_ms)
        self._pause = pause_between_looks(self._ttl, found.workers)
        for worker, last_seen in found.silent:
            if is_steady or is_given_back(worker):
                async with source.accounts:  # what a claim has moved is not here before its reply is
                    await self._claim(worker, last_seen, found.now_ms)

    async def _claim(self, worker: bytes, last_seen: bytes, now_ms: int) -> None:
        """Take over from a worker that was seen dead what there is room for."""
        source, partition = self._source, self._source.partition
        own_name = source.worker
        room = min(self._room.of(source), MAX_CLAIM)
        if worker == SUSPECTS:
            room = min(room, self._host.room_for_suspects)
        if room < 1 or worker == own_name:
            return
        with self._room.asking(room):
            entries = await partition.claim(worker, last_seen, own_name, room)
        if not entries:
            return
        if own_name != source.worker:  # struck off meanwhile: they are the old name's
            await partition.hand_back(own_name, [(entry.lane, entry.id) for entry in entries])
            return
        name = worker.decode("utf-8", "replace")
        log.info("queue %s: took %d deliveries over from %s", source.queue, len(entries), name)
        self._observers.emit(Claimed(source.queue, name, len(entries)))
        self._host.take_in(source, entries, now_ms)
        if len(entries) == room and worker != SUSPECTS:
            self._look_now.set()

    def _time_jumped(self) -> None:
        self._source.steadiness.start_again()
        self._promote_now.set()

    async def promote(self) -> None:
        """Move delayed messages to their streams when they are due."""
        call_off = self._source.partition.caller.clock.on_jump(self._time_jumped)
        try:
            await self._promote()
        finally:
            call_off()

    async def _promote(self) -> None:
        while True:
            try:
                moved, next_due = await self._source.partition.promote(MAX_PROMOTE)
            except BrokerError as error:
                log.debug("queue %s: promoting: %s", self._source.queue, error)
                await asyncio.sleep(pause_before(3))
                continue
            if moved < MAX_PROMOTE:
                nap = LONGEST_NAP if next_due is None else min(LONGEST_NAP, next_due + 0.001)
                await _nap(self._promote_now, nap)

    async def listen(self) -> None:
        """Follow the control stream while nothing is fetched."""
        source = self._source
        link = source.partition.caller.server.dedicated(source.keys.tag)
        try:
            while True:
                try:
                    reply = (
                        await link.call_many(
                            [
                                (
                                    "XREAD",
                                    "BLOCK",
                                    LISTEN_MS,
                                    "STREAMS",
                                    source.keys.control,
                                    source.last_control,
                                )
                            ],
                            timeout=LISTEN_MS / 1000 + 5.0,
                        )
                    )[0]
                except BrokerError as error:
                    reply = error
                if isinstance(reply, BrokerError):
                    link.drop("lost")
                    await asyncio.sleep(pause_before(4))
                elif reply:
                    self._host.control(source, reply[0][1])
        finally:
            await link.close()


async def _nap(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
    event.clear()
