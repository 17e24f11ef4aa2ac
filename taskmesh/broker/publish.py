"""The producer's side: numbered batches, one under way at a time, so that a batch sent twice is added once.

While a batch is under way, what is submitted meanwhile gathers for the next one: single submits from many
coroutines merge by themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import secrets
from collections import deque
from collections.abc import Sequence
from itertools import islice

from taskmesh.broker.caller import pause_before
from taskmesh.broker.confirm import ConfirmingCaller
from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerUnavailable, NotConfirmed, QueueFull, TaskmeshError
from taskmesh.events import Observers, Submitted
from taskmesh.settings import MIB, Durability, QueueOptions

MAX_BATCH = 1000
MAX_BATCH_BYTES = 4 * MIB
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"


def new_producer() -> str:
    """A name of 12 characters that no other producer has (62 random bits)."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(12))


class _Unit:
    """Messages that were submitted together, and the places that they were put in so far."""

    __slots__ = ("blobs", "deadline", "done", "doubt", "due", "places", "rest", "size_bytes")

    def __init__(
        self, messages: Sequence[bytes], due: str | None, blobs: Sequence[bytes], deadline: float | None
    ) -> None:
        self.rest = messages
        self.due = due
        self.blobs = blobs
        self.deadline = deadline
        self.places: list[str | None] = []
        self.doubt = ""
        self.size_bytes = sum(map(len, messages))
        self.done: asyncio.Future[list[str | None]] = asyncio.get_running_loop().create_future()

    def fail(self, error: TaskmeshError) -> None:
        if not self.done.done():
            self.done.set_exception(error)

    def end(self) -> None:
        """All of it is in."""
        if self.doubt:
            self.fail(NotConfirmed(f"accepted by the primary, and going to run; {self.doubt}", self.places))
        elif not self.done.done():
            self.done.set_result(self.places)


class Publisher:
    """One producer's way into one partition; ``durability`` is what each batch waits for."""

    def __init__(
        self,
        partition: Partition,
        producer: str,
        options: QueueOptions,
        observers: Observers,
        durability: Durability | None = None,
    ) -> None:
        self._confirming: ConfirmingCaller | None = None
        if durability is not None:
            self._confirming = ConfirmingCaller(partition.caller, durability, partition.keys.tag)
            partition = copy.copy(partition)
            partition.caller = self._confirming
        self._partition = partition
        self._producer = producer
        self._options = options
        self._observers = observers
        self._number = 0
        self._units: deque[_Unit] = deque()
        self._sending: asyncio.Task[None] | None = None

    async def submit(
        self, messages: Sequence[bytes], due: str | None = None, blobs: Sequence[bytes] = ()
    ) -> list[str | None]:
        """Publish encoded messages, in order, and return where each was put.

        Args:
            due: when they are due: None at once, "+ms" from now, or "ms" of Redis time.
            blobs: the chunks that belong to a single message.

        Raises:
            QueueFull: the bound is reached; the messages before the full mark are in.
            BrokerFull: the server has no memory left; nothing of the last batch is in.
            BrokerUnavailable: the server stayed away; whether the last batch is in is not known.
            NotConfirmed: all are in, and not confirmed in time.
        """
        wait = self._options.wait_timeout
        deadline = None if wait is None else asyncio.get_running_loop().time() + wait
        unit = _Unit(messages, due, blobs, deadline)
        self._units.append(unit)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send_all(), name=f"taskmesh publisher {self._producer}")
        return await unit.done

    async def _send_all(self) -> None:
        refused = 0
        try:
            while self._units:
                units = self._next_batch()
                try:
                    accepted, wanted = await self._send(units)
                except TaskmeshError as error:
                    for unit in units:
                        self._units.remove(unit)
                        unit.fail(error)
                    continue
                if accepted < wanted:
                    refused = 0 if accepted else refused + 1
                    await self._wait_for_room(refused)
        finally:
            self._sending = None
            while self._units:  # only when this task was cancelled or is at fault
                self._units.popleft().fail(
                    BrokerUnavailable("the client was closed before this was submitted")
                )

    def _next_batch(self) -> list[_Unit]:
        """The units that go into the next call; a unit larger than a call goes piece by piece, alone."""
        units = [self._units[0]]
        count, size_bytes = len(units[0].rest), units[0].size_bytes
        for unit in islice(self._units, 1, None):
            count += len(unit.rest)
            size_bytes += unit.size_bytes
            if unit.blobs or units[0].blobs or count > MAX_BATCH or size_bytes > MAX_BATCH_BYTES:
                break
            units.append(unit)
        return units

    async def _send(self, units: list[_Unit]) -> tuple[int, int]:
        """Send one batch; returns how many messages were accepted, and of how many."""
        # The script adds what is due now before what is due later: places come back in that order.
        units.sort(key=lambda unit: unit.due is not None)
        pieces = [(unit, unit.rest[:MAX_BATCH]) for unit in units]
        now = [message for unit, piece in pieces if unit.due is None for message in piece]
        later = [(unit.due, message) for unit, piece in pieces if unit.due is not None for message in piece]
        self._number += 1
        accepted = await self._partition.submit(
            self._producer, self._number, self._options.partition_length, now, later, units[0].blobs
        )
        if accepted.messages < 0:
            raise BrokerUnavailable(
                "the blob's chunks were gone before the message could be added; submit again"
            )
        doubt = self._confirming.doubt if self._confirming is not None else ""
        first = 0
        size_bytes = 0
        for unit, piece in pieces:
            places = accepted.places[first : first + len(piece)]
            first += len(piece)
            size_bytes += sum(map(len, unit.rest[: len(places)]))
            unit.places += places
            unit.doubt = unit.doubt or doubt
            unit.rest = unit.rest[len(places) :]
            if not unit.rest:
                self._units.remove(unit)
                unit.end()
        if accepted.messages:
            self._observers.emit(Submitted(self._partition.keys.queue, accepted.messages, size_bytes))
        return accepted.messages, len(now) + len(later)

    async def _wait_for_room(self, refused: int) -> None:
        """The queue is full: refuse, or wait, as its options say."""
        options = self._options
        full = f"queue {self._partition.keys.queue!r} holds its bound of {options.max_length} messages"
        now = asyncio.get_running_loop().time()
        for unit in list(self._units):
            late = unit.deadline is not None and now >= unit.deadline
            if options.when_full == "reject" or late:
                self._units.remove(unit)
                waited = f" after {options.wait_timeout:g} s" if late else ""
                unit.fail(QueueFull(f"{full}{waited}; {len(unit.rest)} left out"))
            elif unit.done.done():  # its submitter has gone
                self._units.remove(unit)
        if self._units:
            await asyncio.sleep(pause_before(min(refused, 4)))

    async def close(self) -> None:
        """Let what is under way finish, and forget the producer's record."""
        while self._sending is not None:
            await asyncio.wait([self._sending])
        if self._number:
            keys = self._partition.keys
            with contextlib.suppress(TaskmeshError):
                await self._partition.caller.command(
                    keys.tag, "UNLINK", keys.producer(self._producer), keys.replies(self._producer)
                )
        if self._confirming is not None:
            await self._confirming.close()
