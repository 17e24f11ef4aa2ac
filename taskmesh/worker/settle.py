"""Endings of many tasks, merged into few calls.

While calls for a partition are under way, endings gather for the next round. A round is up to 16 calls of up to
128 endings, each with a slot and a number of its own, so that after a lost reply every call may be sent again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from operator import attrgetter

from taskmesh.broker.caller import pause_before
from taskmesh.broker.link import Argument, NoGroup
from taskmesh.broker.scripts import SETTLE
from taskmesh.broker.streams import MAX_SETTLE, Settlement
from taskmesh.errors import BrokerError, BrokerUnavailable
from taskmesh.events import Ending, Observers, Settled
from taskmesh.messages import Priority
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.pace import Pace

log = logging.getLogger("taskmesh.worker")
SLOTS = 16
_by_order = attrgetter("order")


class _Call:
    """One settle call of a round.

    Attributes:
        is_late: it was sent more than once: much may have happened between its doing and its answer.
    """

    __slots__ = ("batch", "command", "is_late", "lane")

    def __init__(self, lane: Priority, batch: list[Settlement], command: tuple[Argument, ...]) -> None:
        self.lane = lane
        self.batch = batch
        self.command = command
        self.is_late = False


class Settler:
    """Settles for one partition. ``add`` never waits; ``drained`` waits for the server's word on all of it.

    Args:
        on_delayed: called when messages went to the delayed set.
        on_late: called when the server's word on entries that were given away came late: it may hold some of them
            for this worker again, and the worker not know of it.
    """

    def __init__(
        self,
        source: Source,
        observers: Observers,
        pace: Pace,
        on_delayed: Callable[[], None] = lambda: None,
        on_late: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_delayed = on_delayed
        self._on_late = on_late
        self._source = source
        self._observers = observers
        self._pace = pace
        self._gathered: tuple[list[Settlement], ...] = tuple([] for _ in Priority)
        self._endings: list[Ending] = []
        self._number = 0
        self._flushing: asyncio.Task[None] | None = None
        self._closed = False
        self._delays = False
        self.settled = 0

    def add(self, lane: Priority, settlement: Settlement, ending: Ending) -> None:
        """End a delivery, soon."""
        if self._closed:
            return
        self._gathered[lane].append(settlement)
        self._endings.append(ending)
        self._source.ending += 1
        self._delays |= settlement.kind in "RUWP"
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().create_task(self._flush(), name="taskmesh settle")

    async def drained(self) -> None:
        """Return when everything added so far is settled."""
        while self._flushing is not None:
            await asyncio.wait([self._flushing])

    def close(self) -> None:
        """Settle nothing more: what is not settled yet stays pending, for others to find."""
        self._closed = True
        for gathered in self._gathered:
            gathered.clear()
        if self._flushing is not None:
            self._flushing.cancel()

    async def _flush(self) -> None:
        try:
            while any(self._gathered):
                calls = self._next_round()
                endings, self._endings = self._endings, []
                started = time.monotonic()
                delays, self._delays = self._delays, False
                dropped = await self._send(calls)
                if delays:
                    self._on_delayed()
                for call in calls:
                    self._forget(call)
                    self._source.ending -= len(call.batch)
                self.settled += len(endings)
                now = time.monotonic()
                seconds = now - started
                self._pace.ended(len(endings), now)
                self._observers.emit(Settled(self._source.queue, endings, dropped, seconds))
        finally:
            self._flushing = None

    def _forget(self, call: _Call) -> None:
        """What has been settled is no longer here."""
        held = self._source.held[call.lane]
        if not call.is_late:
            for settlement in call.batch:
                held.pop(settlement.entry, None)
            return
        # An entry may have come back meanwhile, from whoever it was given to or who had claimed it, and has died: as
        # another delivery, which stays, or unseen, because whoever compared took it for the one that was settled.
        for settlement in call.batch:
            now = held.get(settlement.entry)
            if (now.order if isinstance(now, Delivery) else now) == settlement.order:
                del held[settlement.entry]
        if any(settlement.kind in "UWP" for settlement in call.batch):
            self._on_late()

    def _next_round(self) -> list[_Call]:
        calls: list[_Call] = []
        for lane, gathered in zip(Priority, self._gathered, strict=True):
            if not gathered:
                continue
            room = (SLOTS - len(calls)) * MAX_SETTLE
            taken = gathered[:room]
            del gathered[:room]
            taken.sort(key=_by_order)
            for first in range(0, len(taken), MAX_SETTLE):
                batch = taken[first : first + MAX_SETTLE]
                self._number += 1
                command = self._source.partition.settle_command(
                    lane, self._source.worker, self._number, len(calls), batch
                )
                calls.append(_Call(lane, batch, command))
        return calls

    async def _send(self, calls: list[_Call]) -> int:
        """Send a round until the server has answered each call; returns how many outcomes had lost their claim."""
        caller = self._source.partition.caller
        tag = self._source.keys.tag
        left = calls
        dropped = 0
        attempt = 0
        while True:
            try:
                link = caller.server.link(tag)
                replies = await link.call_many([call.command for call in left])
            except BrokerError as error:
                replies = [error] * len(left)
            again: list[_Call] = []
            trouble: BrokerError | None = None
            for call, reply in zip(left, replies, strict=True):
                if isinstance(reply, NoGroup):
                    log.warning(
                        "queue %s: its stream is gone; %d outcomes dropped",
                        self._source.queue,
                        len(call.batch),
                    )
                elif isinstance(reply, BrokerError):
                    call.is_late = True
                    again.append(call)
                    trouble = reply
                elif reply and reply != [-1]:
                    dropped += len(reply)
                    await self._discard([key for place in reply for key in call.batch[place - 1].written])
            if not again:
                return dropped
            left = again
            await self._recover(trouble, attempt)
            attempt += 1

    async def _discard(self, chunks: Sequence[bytes]) -> None:
        """Remove outcomes that do not count; what is left of them goes with its time to live."""
        if chunks:
            with contextlib.suppress(BrokerError):
                await self._source.partition.caller.command(self._source.keys.tag, "UNLINK", *chunks)

    async def _recover(self, trouble: BrokerError | None, attempt: int) -> None:
        caller = self._source.partition.caller
        try:
            await caller.server.refresh()
            await caller.load(self._source.keys.tag, [SETTLE])
        except BrokerError as error:
            trouble = error
        if attempt == 0 and not isinstance(trouble, BrokerUnavailable):
            return
        if attempt == 3:
            log.warning("settling on queue %s waits for the server: %s", self._source.queue, trouble)
        await asyncio.sleep(pause_before(attempt))
