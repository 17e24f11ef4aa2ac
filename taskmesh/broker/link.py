"""One connection that many callers share, and the one place where the server's errors are mapped.

The redis package makes the connection (TLS, authentication, database); from then on commands and replies pass
straight between the callers and the transport. Nothing is retried here: whether a call may be made twice is known
to who makes it.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection

from taskmesh.broker.address import CONNECT_TIMEOUT, Node
from taskmesh.errors import BrokerError, BrokerFull, BrokerRefused, BrokerUnavailable

Argument = bytes | str | int | float | memoryview
Command = tuple[Argument, ...]
Made = tuple[
    AbstractConnection, Node | None, str
]  # a connection, where it leads, and that for people to read
REPLY_TIMEOUT = 5.0
SLOW = 1.0
_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]
_INCOMPLETE = object()
_generations = itertools.count(1)


class Moved(BrokerError):
    """The slot lives on another node now, or is on its way; nothing was done."""


class Demoted(BrokerUnavailable):
    """The node has become a replica; nothing was done."""


class ScriptMissing(BrokerError):
    """The server does not have the script; nothing was done."""


class NoGroup(BrokerError):
    """A stream or its consumer group is gone."""


def error_of_reply(text: str, where: str) -> BrokerError:
    """The error of the tree that stands for an error reply."""
    code = text.partition(" ")[0]
    if code == "OOM" or "OOM command not allowed" in text:
        return BrokerFull(f"{where} is at its memory limit and takes no new work")
    if code == "NOSCRIPT":
        return ScriptMissing(text)
    if code in ("MOVED", "ASK", "TRYAGAIN"):
        return Moved(text)
    if code in ("NOGROUP", "UNBLOCKED") or "NOGROUP" in text:
        return NoGroup(text)
    if code == "READONLY":
        return Demoted(f"{where} is a replica now")
    if code in ("LOADING", "BUSY", "CLUSTERDOWN", "MASTERDOWN", "NOREPLICAS", "MISCONF"):
        return BrokerUnavailable(f"{where} takes no writes now: {text}")
    if code in ("NOAUTH", "WRONGPASS", "NOPERM") or "invalid password" in text or "ACL failure" in text:
        return BrokerRefused(f"{where} refused the credentials: {text}")
    return BrokerRefused(f"{where}: {text}")


def error_of_connection(error: BaseException, where: str) -> BrokerError:
    """The error of the tree that stands for what the client library or the system raised while connecting."""
    text = str(error) or type(error).__name__
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        return BrokerRefused(f"{where} refused the credentials: {text}")
    if isinstance(error, redis_errors.ResponseError):
        return error_of_reply(text, where)
    if isinstance(error.__cause__ or error.__context__, ssl.SSLCertVerificationError):
        return BrokerRefused(f"{where} cannot be trusted: {text}")
    return BrokerUnavailable(f"no answer from {where}: {text}")


class _Group:
    """Commands that were sent together, and the replies so far."""

    __slots__ = ("count", "done", "replies", "sent", "timer")

    def __init__(self, count: int, done: asyncio.Future[list[Any]], sent: float) -> None:
        self.count = count
        self.done = done
        self.sent = sent
        self.replies: list[Any] = []
        self.timer: asyncio.TimerHandle | None = None


class _Replies(asyncio.Protocol):
    """Reads the replies of one connection and hands them to the groups that wait, in order."""

    def __init__(self, where: str, on_lost: Callable[[_Replies, BrokerError], None]) -> None:
        self._where = where
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self.waiting: deque[_Group] = deque()
        self.quickest = math.inf
        self.writable = asyncio.Event()
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self.waiting
        demoted: Demoted | None = None
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _INCOMPLETE:
                if isinstance(reply, hiredis.ReplyError):
                    reply = error_of_reply(str(reply), self._where)
                    if isinstance(reply, Demoted):
                        demoted = reply
                group = waiting[0]
                group.replies.append(reply)
                if len(group.replies) == group.count:
                    waiting.popleft()
                    self.quickest = min(self.quickest, time.monotonic() - group.sent)
                    if not group.done.done():
                        group.done.set_result(group.replies)
        except (hiredis.HiredisError, IndexError) as error:
            self._on_lost(
                self, BrokerUnavailable(f"{self._where} does not speak the Redis protocol: {error}")
            )
        if demoted is not None:  # whoever calls next looks for the primary
            self._on_lost(self, demoted)

    def connection_lost(self, error: Exception | None) -> None:
        reason = str(error) if error else "closed by the server"
        self._on_lost(self, BrokerUnavailable(f"the connection to {self._where} was lost: {reason}"))

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()


class Link:
    """One connection; callers' commands go out as they come, and replies are handed back in order.

    A lost connection fails every call under way with BrokerUnavailable; the next call opens a new one.

    Args:
        make: makes a connection to wherever the link leads now.
        on_slow: called for every second that an answer takes, blocking reads left aside.
        greet: looks at a new connection before it is used, and raises where it will not do.

    Attributes:
        generation: a number that no other connection has, so that a caller can tell that one was unbroken.
        node: where the last one led.
    """

    def __init__(
        self,
        make: Callable[[], Made],
        on_slow: Callable[[], None] = lambda: None,
        greet: Callable[[AbstractConnection], Awaitable[None]] | None = None,
    ) -> None:
        self._make = make
        self._on_slow = on_slow
        self._greet = greet
        self.where = ""
        self.node: Node | None = None
        self.generation = 0
        self._connection: AbstractConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._replies: _Replies | None = None
        self._opening = asyncio.Lock()
        self._closed = False
        self._limit: asyncio.Timeout | None = None  # of a connection that is being made

    @property
    def round_trip(self) -> float:
        """Seconds that the quickest answer on this connection took; endless before the first."""
        return math.inf if self._replies is None else self._replies.quickest

    async def call(self, *command: Argument) -> Any:
        """Send one command and return its reply.

        Raises:
            BrokerError: the server's error reply, or a lost connection.
        """
        reply = (await self.call_many((command,)))[0]
        if isinstance(reply, BrokerError):
            raise reply
        return reply

    async def call_many(self, commands: Sequence[Command], timeout: float = REPLY_TIMEOUT) -> list[Any]:
        """Send several commands at once and return their replies; error replies stand in the list as BrokerError.

        A server that has not answered the last of them within ``timeout`` seconds counts as lost.

        Raises:
            BrokerUnavailable: the connection cannot be made, or was lost before all had answered.
        """
        if self._replies is None:
            await self._open(min(timeout, CONNECT_TIMEOUT))
        replies, transport = self._replies, self._transport
        assert replies is not None
        assert transport is not None
        loop = asyncio.get_running_loop()
        group = _Group(len(commands), loop.create_future(), time.monotonic())
        packed = [_pack(command) for command in commands]
        replies.waiting.append(group)
        transport.writelines(packed)
        if timeout > REPLY_TIMEOUT:
            group.timer = loop.call_later(timeout, self._overdue, replies, timeout)
        else:
            group.timer = loop.call_later(min(SLOW, timeout), self._slow, replies, group, timeout, timeout)
        try:
            if not replies.writable.is_set():
                await replies.writable.wait()
            return await group.done
        finally:
            group.timer.cancel()

    def _slow(self, replies: _Replies, group: _Group, left: float, timeout: float) -> None:
        """No answer for another second (or for ``left``, where that is less)."""
        left -= SLOW
        if left <= 0:
            self._overdue(replies, timeout)
            return
        group.timer = asyncio.get_running_loop().call_later(
            min(SLOW, left), self._slow, replies, group, left, timeout
        )
        self._on_slow()

    def _overdue(self, replies: _Replies, timeout: float) -> None:
        self._lose(replies, BrokerUnavailable(f"no answer from {self.where} for {timeout:g} s"))

    async def _open(self, timeout: float) -> None:
        async with self._opening:
            if self._closed:
                raise BrokerUnavailable(f"the connection to {self.where} is closed")
            if self._replies is not None:
                return
            connection, self.node, self.where = self._make()
            slow = asyncio.get_running_loop().call_later(SLOW, self._on_slow)
            try:
                async with asyncio.timeout(timeout) as self._limit:
                    await connection.connect()  # type: ignore[no-untyped-call]
                    if self._greet is not None:
                        await self._greet(connection)
            except (redis_errors.RedisError, OSError, TimeoutError) as error:
                await discard(connection)
                raise error_of_connection(error, self.where) from None
            except BrokerError:
                await discard(connection)
                raise
            finally:
                slow.cancel()
                self._limit = None
            # The handshake is over and answered: from here on the client library's reader would only be in the way.
            transport: Any = connection._writer.transport  # type: ignore[union-attr]
            replies = _Replies(self.where, self._lose)
            transport.set_protocol(replies)
            self.generation = next(_generations)
            self._connection, self._transport, self._replies = connection, transport, replies

    def _lose(self, replies: _Replies, reason: BrokerError) -> None:
        """Fail what waits on a connection that is gone."""
        replies.writable.set()
        lost, replies.waiting = replies.waiting, deque()
        for group in lost:
            if not group.done.done():
                group.done.set_exception(reason)
                group.done.exception()  # its caller may have been cancelled: then nobody else looks at it
        if self._replies is replies:
            connection, transport = self._connection, self._transport
            self._connection = self._transport = self._replies = None
            if transport is not None:
                transport.abort()
            if connection is not None:
                connection._close()  # type: ignore[no-untyped-call]

    def drop(self, reason: str = "dropped") -> None:
        """Cut the connection, or the making of one: calls under way fail, the next call opens a new one."""
        if self._replies is not None:
            self._lose(self._replies, BrokerUnavailable(f"the connection to {self.where} was {reason}"))
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(0.0)

    async def close(self) -> None:
        """End the connection for good."""
        self._closed = True
        connection = self._connection
        self.drop("closed")
        if connection is not None:
            await discard(connection)


async def discard(connection: AbstractConnection) -> None:
    """Throw a connection away, whatever state it is in."""
    try:
        await connection.disconnect(nowait=True)
    except (redis_errors.RedisError, OSError):
        pass
