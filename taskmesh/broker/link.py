"""One connection that many callers share, and the one place where foreign errors are mapped.

Nothing is retried here: whether a call may be made twice is known to who makes it.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import hiredis
from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection

from taskmesh.errors import BrokerError, BrokerFull, BrokerRefused, BrokerUnavailable

Argument = bytes | str | int | float
_pack: Callable[[tuple[Argument, ...]], bytes] = hiredis.pack_command  # type: ignore[assignment]
CONNECT_TIMEOUT = 5.0
REPLY_TIMEOUT = 5.0


class Moved(BrokerError):
    """The slot lives on another node now, or is on its way; nothing was done."""


class ScriptMissing(BrokerError):
    """The server does not have the script; nothing was done."""


class NoGroup(BrokerError):
    """A stream or its consumer group is gone."""


def map_error(error: BaseException, where: str) -> BrokerError:
    """The error of the tree that stands for one of the client library's or of the system's."""
    if isinstance(error, BrokerError):
        return error
    text = str(error) or type(error).__name__
    match error:
        case redis_errors.AuthenticationError() | redis_errors.AuthorizationError():
            return BrokerRefused(f"{where} refused the credentials: {text}")
        case redis_errors.BusyLoadingError():
            return BrokerUnavailable(f"{where} is still loading its data")
        case redis_errors.OutOfMemoryError():
            return BrokerFull(f"{where} is at its memory limit and takes no new work")
        case redis_errors.NoScriptError():
            return ScriptMissing(text)
        case redis_errors.ClusterDownError() | redis_errors.ReadOnlyError() | redis_errors.MasterDownError():
            return BrokerUnavailable(f"{where} takes no writes now: {text}")
        case redis_errors.AskError() | redis_errors.TryAgainError():  # MovedError is an AskError
            return Moved(text)
        case redis_errors.ConnectionError() | redis_errors.TimeoutError() | OSError():
            return BrokerUnavailable(f"no answer from {where}: {text}")
    if "OOM command not allowed" in text:
        return BrokerFull(f"{where} is at its memory limit and takes no new work")
    if "NOGROUP" in text or text.startswith("UNBLOCKED"):
        return NoGroup(text)
    if "NOAUTH" in text or "WRONGPASS" in text or "NOPERM" in text:
        return BrokerRefused(f"{where} refused the credentials: {text}")
    return BrokerRefused(f"{where}: {text}")


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
        self._waiting: deque[asyncio.Future[Any]] = deque()
        self._reader: asyncio.Task[None] | None = None
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

    async def call_many(
        self, commands: Sequence[tuple[Argument, ...]], timeout: float = REPLY_TIMEOUT
    ) -> list[Any]:
        """Send several commands at once; error replies stand in the list as BrokerError.

        A server that has not answered the last of them within ``timeout`` seconds counts as lost.
        """
        connection = self._connection or await self._open()
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in commands]
        self._waiting.extend(futures)
        overdue = loop.call_later(timeout, self._overdue, connection, timeout)
        replies: list[Any] = []
        try:
            await self._write(connection, [_pack(command) for command in commands])
            for future in futures:
                try:
                    replies.append(await future)
                except BrokerError as error:
                    replies.append(error)
        finally:
            overdue.cancel()
        return replies

    def _overdue(self, connection: AbstractConnection, timeout: float) -> None:
        self._lose(connection, BrokerUnavailable(f"no answer from {self.where} for {timeout:g} s"))

    async def _write(self, connection: AbstractConnection, packed: list[bytes]) -> None:
        # The client writes before it first suspends, so that the order of commands is that of the futures.
        try:
            await connection.send_packed_command(packed, check_health=False)
        except (redis_errors.RedisError, OSError) as error:
            self._lose(connection, map_error(error, self.where))

    async def _open(self) -> AbstractConnection:
        async with self._opening:
            if self._closed:
                raise BrokerUnavailable(f"the connection to {self.where} is closed")
            if self._connection is not None:
                return self._connection
            connection = self._make()
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await connection.connect()  # type: ignore[no-untyped-call]
            except (redis_errors.RedisError, OSError, TimeoutError) as error:
                await discard(connection)
                raise map_error(error, self.where) from None
            self.generation += 1
            self._connection = connection
            self._reader = asyncio.create_task(self._read(connection), name=f"taskmesh link to {self.where}")
            return connection

    async def _read(self, connection: AbstractConnection) -> None:
        reason: BrokerError = BrokerUnavailable(f"the connection to {self.where} was closed")
        try:
            while True:
                try:
                    reply = await connection.read_response(timeout=math.inf, disconnect_on_error=False)
                except redis_errors.ResponseError as error:
                    _settle(self._waiting.popleft(), map_error(error, self.where))
                    continue
                future = self._waiting.popleft()
                if not future.done():
                    future.set_result(reply)
        except (redis_errors.RedisError, OSError, IndexError) as error:
            reason = map_error(error, self.where)
        finally:
            self._lose(connection, reason)
            await discard(connection)

    def _lose(self, connection: AbstractConnection, reason: BrokerError) -> None:
        """Fail what waits on a connection that is gone."""
        if self._connection is not connection:
            return
        self._connection = None
        reader, self._reader = self._reader, None
        if reader is not None and reader is not asyncio.current_task():
            reader.cancel()
        lost, self._waiting = self._waiting, deque()
        for future in lost:
            _settle(future, reason)

    def drop(self, reason: str = "dropped") -> None:
        """Cut the connection: calls under way fail, the next call opens a new one."""
        if self._connection is not None:
            self._lose(self._connection, BrokerUnavailable(f"the connection to {self.where} was {reason}"))

    async def close(self) -> None:
        """End the connection for good."""
        self._closed = True
        reader = self._reader
        self.drop("closed")
        if reader is not None:
            await asyncio.gather(reader, return_exceptions=True)


def _settle(future: asyncio.Future[Any], error: BrokerError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # its caller may have been cancelled: then nobody else looks at it


async def discard(connection: AbstractConnection) -> None:
    """Throw a connection away, whatever state it is in."""
    try:
        await connection.disconnect(nowait=True)
    except (redis_errors.RedisError, OSError):
        pass
