"""One connection that many callers share, and the one place where the server's errors are mapped.

The redis package makes the connection (TLS, authentication, database); from then on commands and replies pass
straight between the callers and the transport. Nothing is retried here: whether a call may be made twice is known
to who makes it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection

from taskmesh.errors import BrokerError, BrokerFull, BrokerRefused, BrokerUnavailable

Argument = bytes | str | int | float | memoryview
Command = tuple[Argument, ...]
CONNECT_TIMEOUT = 5.0
REPLY_TIMEOUT = 5.0
_pack: Callable[[Command], bytes] = hiredis.pack_command  # type: ignore[assignment]
_INCOMPLETE = object()


class Moved(BrokerError):
    """The slot lives on another node now, or is on its way; nothing was done."""


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
    if code in ("LOADING", "CLUSTERDOWN", "READONLY", "MASTERDOWN", "NOREPLICAS"):
        return BrokerUnavailable(f"{where} takes no writes now: {text}")
    if code in ("NOAUTH", "WRONGPASS", "NOPERM") or "invalid password" in text:
        return BrokerRefused(f"{where} refused the credentials: {text}")
    return BrokerRefused(f"{where}: {text}")


def error_of_connection(error: BaseException, where: str) -> BrokerError:
    """The error of the tree that stands for what the client library or the system raised while connecting."""
    text = str(error) or type(error).__name__
    if isinstance(error, redis_errors.AuthenticationError | redis_errors.AuthorizationError):
        return BrokerRefused(f"{where} refused the credentials: {text}")
    if isinstance(error, redis_errors.ResponseError):
        return error_of_reply(text, where)
    return BrokerUnavailable(f"no answer from {where}: {text}")


class _Group:
    """Commands that were sent together, and the replies so far."""

    __slots__ = ("count", "done", "replies")

    def __init__(self, count: int, done: asyncio.Future[list[Any]]) -> None:
        self.count = count
        self.done = done
        self.replies: list[Any] = []


class _Replies(asyncio.Protocol):
    """Reads the replies of one connection and hands them to the groups that wait, in order."""

    def __init__(self, where: str, on_lost: Callable[[_Replies, BrokerError], None]) -> None:
        self._where = where
        self._on_lost = on_lost
        self._reader = hiredis.Reader(notEnoughData=_INCOMPLETE)
        self.waiting: deque[_Group] = deque()
        self.writable = asyncio.Event()
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self.waiting
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not _INCOMPLETE:
                if isinstance(reply, hiredis.ReplyError):
                    reply = error_of_reply(str(reply), self._where)
                group = waiting[0]
                group.replies.append(reply)
                if len(group.replies) == group.count:
                    waiting.popleft()
                    if not group.done.done():
                        group.done.set_result(group.replies)
        except (hiredis.HiredisError, IndexError) as error:
            self._on_lost(
                self, BrokerUnavailable(f"{self._where} does not speak the Redis protocol: {error}")
            )

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
    ``generation`` counts the connections made, so that a caller can tell that a connection was unbroken.
    """

    def __init__(self, make: Callable[[], AbstractConnection], where: str) -> None:
        self._make = make
        self.where = where
        self.generation = 0
        self._connection: AbstractConnection | None = None
        self._transport: asyncio.Transport | None = None
        self._replies: _Replies | None = None
        self._opening = asyncio.Lock()
        self._closed = False

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
            await self._open()
        replies, transport = self._replies, self._transport
        assert replies is not None
        assert transport is not None
        loop = asyncio.get_running_loop()
        group = _Group(len(commands), loop.create_future())
        packed = [_pack(command) for command in commands]
        replies.waiting.append(group)
        transport.writelines(packed)
        overdue = loop.call_later(timeout, self._overdue, replies, timeout)
        try:
            if not replies.writable.is_set():
                await replies.writable.wait()
            return await group.done
        finally:
            overdue.cancel()

    def _overdue(self, replies: _Replies, timeout: float) -> None:
        self._lose(replies, BrokerUnavailable(f"no answer from {self.where} for {timeout:g} s"))

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise BrokerUnavailable(f"the connection to {self.where} is closed")
            if self._replies is not None:
                return
            connection = self._make()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await connection.connect()  # type: ignore[no-untyped-call]
            except (redis_errors.RedisError, OSError, TimeoutError) as error:
                await discard(connection)
                raise error_of_connection(error, self.where) from None
            # The handshake is over and answered: from here on the client library's reader would only be in the way.
            transport: Any = connection._writer.transport  # type: ignore[union-attr]
            replies = _Replies(self.where, self._lose)
            transport.set_protocol(replies)
            self.generation += 1
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
        """Cut the connection: calls under way fail, the next call opens a new one."""
        if self._replies is not None:
            self._lose(self._replies, BrokerUnavailable(f"the connection to {self.where} was {reason}"))

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
