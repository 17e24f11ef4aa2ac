"""Bringing deliveries in: from one partition, as many as there is room for.

While there is work a script enforces the total over the lanes; when there is none a blocking read waits for it.
A fetch is never cancelled: the server may have delivered already. After any error the worker asks what the
server holds for it, and adopts what it lacks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, Protocol

from taskmesh.broker.caller import pause_before
from taskmesh.broker.link import Moved, NoGroup, ScriptMissing
from taskmesh.broker.scripts import FETCH
from taskmesh.broker.streams import CONTROL_LENGTH, lane_quotas, read_fetched
from taskmesh.errors import BrokerError, BrokerRefused
from taskmesh.messages import Entry
from taskmesh.worker.deliveries import Source
from taskmesh.worker.room import Room

log = logging.getLogger("taskmesh.worker")
BLOCK = 5.0
REPLY_MARGIN = 5.0
WAITING_SHARE = 16
MUCH = 200  # deliveries: about a millisecond of work at least


class Host(Protocol):
    """Who takes the entries."""

    def take_in(self, source: Source, entries: Sequence[Entry], now_ms: int) -> None: ...

    def control(self, source: Source, entries: Sequence[tuple[bytes, list[bytes]]]) -> None: ...

    async def rejoin(self, source: Source) -> None: ...


class Fetcher:
    """Fetches from one partition until it is stopped.

    Args:
        longest_wait: seconds that a read may block. Shorter than the liveness TTL, so that a worker that was struck
            off does not go on receiving under its old name.
        beside: how many fetchers the worker has. Those that wait keep no room, so each waits for little.
    """

    def __init__(self, source: Source, host: Host, room: Room, longest_wait: float, beside: int) -> None:
        self._source = source
        self._host = host
        self._room = room
        self._block_ms = int(min(BLOCK, longest_wait) * 1000)
        self._share = WAITING_SHARE * beside
        self._partition = source.partition
        self._link = source.partition.caller.server.dedicated(source.keys.tag)
        self._stopping = False
        self._adopt_now = False
        self._nudge: asyncio.Task[None] | None = None
        self._client: tuple[int, int] | None = None  # the connection's generation and its id at the server
        self._turn = 0

    async def run(self) -> None:
        """Fetch until ``stop``; ends only between two fetches."""
        try:
            await self._fetch_all()
        finally:
            await self._link.close()

    async def _fetch_all(self) -> None:
        idle = False
        failures = 0
        while not self._stopping:
            if self._adopt_now:
                await self._recover(self._adopt())
            room = self._room.of(self._source)
            if room < 1:
                await self._room.wait_for(self._source)
                continue
            try:
                idle = not await self._fetch(room, idle)
                failures = 0
                if idle or room < MUCH:
                    # What was brought goes first: its runner starts, and what it ends at once is settled.
                    await asyncio.sleep(0)
                    await asyncio.sleep(0)
                # Where much was brought, the next fetch goes out first: it is on its way while the work is done.
            except NoGroup:
                await self._recover(self._host.rejoin(self._source))
                self._adopt_now = True  # the script may have read one lane before it missed another
                idle = False
            except ScriptMissing:
                await self._recover(self._partition.caller.load(self._source.keys.tag, [FETCH]))
            except BrokerError as error:
                if self._stopping:
                    break
                if failures == 3:
                    log.warning("queue %s: fetching waits for the server: %s", self._source.queue, error)
                if isinstance(error, BrokerRefused) and failures == 0:
                    log.error("queue %s: the server refused a fetch: %s", self._source.queue, error)
                await asyncio.sleep(pause_before(failures))
                failures += 1
                if isinstance(error, Moved):
                    self._link.drop("moved")
                await self._recover(self._adopt())

    async def _recover(self, step: Coroutine[Any, Any, None]) -> None:
        try:
            await step
        except BrokerError as error:
            log.debug("queue %s: %s", self._source.queue, error)
            await asyncio.sleep(pause_before(2))

    async def _fetch(self, room: int, idle: bool) -> bool:
        """One fetch; True when there may be more where it came from."""
        source, worker = self._source, self._source.worker
        keys = source.keys
        quotas = lane_quotas(room, self._turn)
        asked = max(1, room // self._share) if idle else room
        if idle:
            read = self._partition.wait_command(worker, asked, self._block_ms)
            timeout = self._block_ms / 1000 + REPLY_MARGIN
        else:
            read = self._partition.fetch_command(worker, asked, quotas)
            timeout = REPLY_MARGIN
        # The control stream is read right behind the delivery: whoever was cancelled before it is known here.
        control = ("XREAD", "COUNT", CONTROL_LENGTH, "STREAMS", keys.control, source.last_control)
        with self._room.asking(0 if idle else asked):
            if self._client is None or self._client[0] != self._link.generation:
                self._client = (self._link.generation, int(await self._link.call("CLIENT", "ID")))
            reply, control_reply, time = await self._link.call_many([read, control, ("TIME",)], timeout)
            source.round_trip = self._link.round_trip
        for answer in (control_reply, time, reply):
            if isinstance(answer, BrokerError):
                raise answer
        if control_reply:
            self._host.control(source, control_reply[0][1])
        entries = self._partition.read_waited(reply) if idle else read_fetched(reply)
        if entries and worker != source.worker:
            # Struck off meanwhile: they were delivered to a name that is no longer this worker's.
            await self._partition.hand_back(worker, [(entry.lane, entry.id) for entry in entries])
        elif entries:
            self._turn += len(entries)
            now_ms = int(time[0]) * 1000 + int(time[1]) // 1000 + self._partition.caller.clock.offset_ms
            self._host.take_in(source, entries, now_ms)
        return len(entries) >= asked

    async def _adopt(self) -> None:
        """Take in what the server delivered and this worker never saw."""
        async with self._source.accounts:  # what is being handed back is neither here nor there
            await self._adopt_lacking()

    async def _adopt_lacking(self) -> None:
        self._adopt_now = False
        source, worker = self._source, self._source.worker
        before = tuple(frozenset(lane) for lane in source.held)  # it may be settled while the server is asked
        try:
            lacking = [
                (lane, entry_id, deliveries)
                for lane, entry_id, deliveries in await self._partition.own_pending(worker)
                if entry_id not in before[lane] and entry_id not in source.held[lane]
            ]
            if not lacking:
                return
            entries = [await self._partition.read(*item) for item in lacking]
            seconds, micros = await self._partition.caller.command(source.keys.tag, "TIME")
        except BrokerError:
            self._adopt_now = True
            raise
        if worker != source.worker:
            return  # struck off meanwhile: they are others' now
        now_ms = int(seconds) * 1000 + int(micros) // 1000 + self._partition.caller.clock.offset_ms
        fresh = [entry for entry in entries if entry.id not in source.held[entry.lane]]
        log.info("queue %s: adopted %d deliveries", self._source.queue, len(fresh))
        self._host.take_in(self._source, fresh, now_ms)

    def adopt(self) -> None:
        """Soon, take in what the server holds for this worker and the worker does not know of."""
        self._adopt_now = True
        self._nudge = asyncio.create_task(self.unblock(), name="taskmesh nudge")

    def stop(self) -> None:
        """End after the fetch under way; ``unblock`` hastens it."""
        self._stopping = True

    async def unblock(self) -> None:
        """Let a blocking read come back now."""
        if self._client is None:
            return
        try:
            link = self._partition.caller.server.link(self._source.keys.tag)
            await link.call("CLIENT", "UNBLOCK", self._client[1])
        except BrokerError:
            self._link.drop("stopped")
