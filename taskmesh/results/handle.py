"""What a submitter holds: the way to a task's result, and to its cancellation."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar, overload

import msgspec

from taskmesh.broker import blobs
from taskmesh.broker.streams import Cancelled, Partition
from taskmesh.codec import blob_of, decode_outcome, encode_outcome
from taskmesh.errors import (
    BrokerError,
    DecodeError,
    ResultTimeout,
    ResultUnavailable,
    TaskCancelled,
    TaskExpired,
    TaskFailed,
)
from taskmesh.messages import Outcome, Priority, Status
from taskmesh.results.inbox import Inbox
from taskmesh.signatures import convert
from taskmesh.signing import digest_of
from taskmesh.tasks import TaskDefinition

R = TypeVar("R")


def _nothing() -> None:
    pass


_CANCELLED = encode_outcome(Outcome(Status.CANCELLED))


class Held(NamedTuple):
    """A delivery that a worker has: whose it is, and for how many seconds."""

    worker: str
    seconds: float


class Handle(Generic[R]):
    """One submitted task.

    Attributes:
        id: the message's id; ``Task.handle`` makes a handle of it in another process.
    """

    __slots__ = (
        "_blob_chunks",
        "_data",
        "_inbox",
        "_lane",
        "_outcome",
        "_own",
        "_partition",
        "_place",
        "_submitted",
        "_task",
        "_ttl",
        "id",
    )

    def __init__(
        self,
        message_id: str,
        task: TaskDefinition,
        partition: Partition,
        inbox: Inbox | None,
        ttl: float,
        lane: Priority,
        place: str | None = None,
        blob_chunks: int = 0,
        own: bool = True,
    ) -> None:
        self.id = message_id
        self._task = task
        self._partition = partition
        self._inbox = inbox
        self._ttl = ttl
        self._lane = lane
        self._place = place
        self._blob_chunks = blob_chunks
        self._own = own
        self._submitted = time.monotonic()
        self._data: bytes | None = None
        self._outcome: Outcome | None = None

    def __repr__(self) -> str:
        return f"<Handle {self.id} of task {self._task.name!r}>"

    @property
    def task(self) -> str:
        """The task's name."""
        return self._task.name

    async def result(self, timeout: float | None = None) -> R:
        """The handler's result, as its return annotation says.

        Raises:
            TaskFailed: the handler raised (or the exception itself, where its type is among the task's ``raises``).
            TaskCancelled, TaskExpired: it ended so.
            ResultTimeout: no outcome within ``timeout`` seconds; the task goes on.
            ResultUnavailable: results are off for this task, or the record has expired. The latter is noticed where
                not more than 2,000 messages wait in its partition; else the waiting goes on.
            DecodeError: the outcome is damaged, over the size limit, or not signed as this Mesh wants it.
        """
        outcome = await self.outcome(timeout)
        if outcome.status is Status.SUCCEEDED:
            try:
                value: R = convert(outcome.value, self._task.signature.returns)
            except (msgspec.ValidationError, ValueError, TypeError) as error:
                wanted = self._task.signature.returns
                raise TaskFailed(
                    "TypeError", f"the result does not fit the annotation {wanted}: {error}"
                ) from None
            return value
        raise self._error(outcome)

    async def outcome(self, timeout: float | None = None) -> Outcome:
        """How the task ended, as a value; nothing is raised for a task that failed.

        Raises:
            ResultTimeout, ResultUnavailable, DecodeError: as ``result``.
        """
        if self._outcome is None:
            if self._inbox is None:
                raise ResultUnavailable(f"task {self._task.name!r} keeps no results (its result_ttl is 0)")
            data = self._data or await self._wait(self._inbox, timeout)
            self._outcome = await self._decode(data)
        return self._outcome

    def watch(self, on_end: Callable[[Handle[R]], None]) -> Callable[[], None]:
        """Have ``on_end`` called, from the event loop, when the task has ended; returns how to call it off."""
        if self._inbox is None:
            asyncio.get_running_loop().call_soon(on_end, self)
            return _nothing
        inbox = self._inbox
        future = inbox.expect(self.id, self._own)

        def ended(done: asyncio.Future[bytes]) -> None:
            if done.cancelled():
                return
            if done.exception() is None:
                self._data = done.result()
            on_end(self)

        def call_off() -> None:
            inbox.forget(self.id, future)
            future.cancel()

        future.add_done_callback(ended)
        return call_off

    async def _wait(self, inbox: Inbox, timeout: float | None) -> bytes:
        loop = asyncio.get_running_loop()
        give_up_at = math.inf if timeout is None else loop.time() + timeout
        # Until then its record lives. Whoever was given the id may come when it has long expired.
        known_until = self._submitted + self._ttl - time.monotonic() if self._own else 0.0
        look_at = loop.time() + max(1.0, known_until)
        while True:
            try:
                async with asyncio.timeout_at(min(give_up_at, look_at)):
                    return await inbox.wait(self.id, self._own)
            except TimeoutError:
                if loop.time() >= give_up_at:
                    raise ResultTimeout(f"{self} has no outcome after {timeout:g} s") from None
            if await self._is_gone(inbox, give_up_at):
                raise ResultUnavailable(f"the record of {self} has expired ({self._ttl:g} s after it ended)")
            look_at = loop.time() + max(1.0, self._ttl)

    async def _is_gone(self, inbox: Inbox, give_up_at: float) -> bool:
        """Whether the message has ended so long ago that its record has expired; False where that is not known."""
        try:
            async with asyncio.timeout_at(give_up_at):
                return not await self._is_in_its_place() and await inbox.search.is_gone(self.id)
        except (TimeoutError, BrokerError):
            return False

    async def _is_in_its_place(self) -> bool:
        if self._place is None or "-" not in self._place:
            return False
        entry = await self._partition.read(self._lane, self._place.encode(), 1)
        return entry.message is not None

    async def _decode(self, data: bytes) -> Outcome:
        partition = self._partition
        if partition.signer is not None:
            data = partition.signer.read_outcome(self.id, data)
        chunks, digest, run = blob_of(data)
        if chunks > blobs.chunk_count(partition.max_payload_bytes):
            raise DecodeError(
                f"the outcome of {self} claims {chunks:,} MiB; the limit is {partition.max_payload_bytes:,} "
                "bytes (MeshSettings.max_payload_bytes)"
            )
        kind = blobs.result_kind(run)
        body = await blobs.download(partition, self.id, kind, chunks) if chunks else None
        if body is not None and digest and digest_of(body) != digest:
            raise DecodeError(f"the blob of {self}'s outcome is not the one that was signed")
        return decode_outcome(data, body)

    def _error(self, outcome: Outcome) -> Exception:
        if outcome.status is Status.CANCELLED:
            return TaskCancelled(f"{self} was cancelled")
        if outcome.status is Status.EXPIRED:
            return TaskExpired(f"{self} had not started when it expired")
        failure = outcome.failure
        if failure is None:
            return TaskFailed("unknown", "the outcome carries no failure")
        failed = TaskFailed(failure.type, failure.message, failure.traceback)
        kind = self._task.raises.get(failure.type)
        if kind is None:
            if failure.traceback:
                failed.add_note(f"remote traceback:\n{failure.traceback}")
            return failed
        try:
            raised = kind(*failure.args)
        except Exception:
            return failed
        raised.__cause__ = failed
        return raised

    async def held(self) -> Held | None:
        """Who has the task; None where it waits for a worker, has ended, or its place is not known."""
        if self._place is None or "-" not in self._place:
            return None
        found = await self._partition.holder(self._lane, self._place.encode())
        return None if found is None else Held(found[0].decode(), found[1] / 1000)

    async def cancel(self) -> Cancelled:
        """Ask for the task's cancellation.

        Returns:
            ``CANCELLED``: it had not started and never will. ``REQUESTED``: it is running, or its place is not
            known: its worker was told (a handler in a thread cannot be stopped; its result is dropped).
            ``ENDED``: it had ended before.
        """
        ttl_ms = int(self._ttl * 1000)
        signer = self._partition.signer
        outcome = _CANCELLED if signer is None else signer.sign_outcome(self.id, _CANCELLED)
        return await self._partition.cancel(
            self.id, self._lane, self._place, outcome, ttl_ms, self._blob_chunks
        )


class Route(NamedTuple):
    """Where a message is, and where its outcome arrives; None where no results are kept."""

    partition: Partition
    inbox: Inbox | None


class Handles(Sequence[Handle[R]]):
    """The handles of a bulk submission, in its order. Each is made when it is looked at: ten thousand of them
    weigh what their ids do.
    """

    __slots__ = ("_blob_chunks", "_ids", "_lane", "_places", "_route", "_task", "_ttl")

    def __init__(
        self, task: TaskDefinition, route: Callable[[str], Route], ttl: float, lane: Priority
    ) -> None:
        self._task = task
        self._route = route
        self._ttl = ttl
        self._lane = lane
        self._ids: list[str] = []
        self._places: list[str | None] = []
        self._blob_chunks: dict[int, int] = {}  # of the few that are large, by their place

    def extend(self, ids: Sequence[str], places: Sequence[str | None], blob_chunks: int = 0) -> None:
        """Take in what was accepted; ``blob_chunks`` belong to a single message."""
        if blob_chunks:
            self._blob_chunks[len(self._ids)] = blob_chunks
        self._ids += ids
        self._places += places

    def __repr__(self) -> str:
        return f"<{len(self)} handles of task {self._task.name!r}>"

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> Handle[R]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Handle[R]]: ...
    def __getitem__(self, index: int | slice) -> Handle[R] | list[Handle[R]]:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return Handle(
            self._ids[index],
            self._task,
            *self._route(self._ids[index]),
            self._ttl,
            self._lane,
            self._places[index],
            self._blob_chunks.get(range(len(self))[index], 0) if self._blob_chunks else 0,
        )
