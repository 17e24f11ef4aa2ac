"""Large values straight between memory and sockets, past the event loop.

An asyncio transport copies what it sends and receives several times. Here a thread sends from the caller's own memory
and receives into it, over connections that carry nothing else: GET and SET, several in flight. The redis package makes
the connections (TLS, authentication, database), as everywhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from redis import connection as blocking
from redis import exceptions as redis_errors

from taskmesh.broker.address import Address, Node
from taskmesh.broker.link import error_of_connection, error_of_reply
from taskmesh.errors import BrokerError, BrokerUnavailable

R = TypeVar("R")
Target = Callable[[int, int], memoryview | None]
THREADS = 4
TIMEOUT = 30.0  # seconds without a byte
IDLE = 4  # connections kept for each node
READ_AHEAD = 64 * 1024
LARGE = 16 * 1024


class _Lost(Exception):
    """The connection is of no use any more."""


class Wire:
    """One connection, used by one thread at a time."""

    def __init__(self, connection: Any, where: str) -> None:
        self._connection = connection
        self._socket: socket.socket = connection._sock
        self._socket.settimeout(TIMEOUT)
        self._where = where
        self._ahead = bytearray(READ_AHEAD)
        self._buffer = memoryview(self._ahead)
        self._at = self._end = 0

    def send_many(self, commands: Iterable[Sequence[bytes | memoryview]]) -> None:
        """Run commands that write, as they come; what they answer is not looked at, unless it is an error.

        Raises:
            BrokerError: the server refused one of them; the others are done.
        """
        sent = 0
        errors: list[BrokerError] = []
        with self._mapped():
            for command in commands:
                self._send(command)
                sent += 1
            for _ in range(sent):
                line = self._line()
                if (error := self._error_of(line)) is not None:
                    errors.append(error)
                if line[:1] == b"$" and line != b"$-1":
                    self._line()
        if errors:
            raise errors[0]

    def _send(self, command: Sequence[bytes | memoryview]) -> None:
        """Large arguments go out from where they lie, what is between them in one piece."""
        small = b"*%d\r\n" % len(command)
        for argument in command:
            size = len(argument) if isinstance(argument, bytes) else argument.nbytes
            small += b"$%d\r\n" % size
            if size < LARGE:
                small += bytes(argument) + b"\r\n"
                continue
            self._socket.sendall(small)
            self._socket.sendall(argument)
            small = b"\r\n"
        self._socket.sendall(small)

    def get_many(
        self, keys: Sequence[bytes], target: Target, taken: Callable[[int], None] = lambda place: None
    ) -> None:
        """GET each key into the memory that ``target(place, size)`` gives for it; None leaves it out.

        Args:
            taken: told the place of each value when it is there.

        Raises:
            BrokerError: the server refused one of them.
        """
        errors: list[BrokerError] = []
        with self._mapped():
            self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n" + _bulk(key) for key in keys))
            for place in range(len(keys)):
                line = self._line()
                if (error := self._error_of(line)) is not None:
                    errors.append(error)
                size = int(line[1:]) if line[:1] == b"$" else -1
                into = target(place, size) if size >= 0 else None
                if size >= 0:
                    self._fill(memoryview(bytearray(size)) if into is None else into.cast("B"))
                    self._fill(memoryview(bytearray(2)))
                if into is not None:
                    taken(place)
        if errors:
            raise errors[0]

    def interrupt(self) -> None:
        """Let the thread that uses it come back now. Any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with contextlib.suppress(redis_errors.RedisError, OSError):
            self._connection.disconnect()

    @contextlib.contextmanager
    def _mapped(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise _Lost(f"no answer from {self._where} for {TIMEOUT:g} s") from None
        except (OSError, ValueError) as error:
            raise _Lost(f"the connection to {self._where} was lost: {error}") from None

    def _error_of(self, line: bytes) -> BrokerError | None:
        if line[:1] != b"-":
            return None
        return error_of_reply(line[1:].decode("utf-8", "replace"), self._where)

    def _line(self) -> bytes:
        """One line of a reply, without its end."""
        line = b""
        while not line.endswith(b"\r\n"):
            if self._at == self._end:
                self._receive()
            found = self._ahead.find(b"\n", self._at, self._end)
            stop = self._end if found < 0 else found + 1
            line += self._buffer[self._at : stop]
            self._at = stop
        return line[:-2]

    def _fill(self, target: memoryview) -> None:
        """Read as many bytes as the target has: those read ahead, then the rest into it directly."""
        size = target.nbytes
        done = min(size, self._end - self._at)
        target[:done] = self._buffer[self._at : self._at + done]
        self._at += done
        while done < size:
            if size - done < READ_AHEAD // 4:
                self._receive()
                self._fill(target[done:])
                return
            count = self._socket.recv_into(target[done:])
            if not count:
                raise OSError("closed by the server")
            done += count

    def _receive(self) -> None:
        self._at, self._end = 0, self._socket.recv_into(self._buffer)
        if not self._end:
            raise OSError("closed by the server")


class Sockets:
    """The connections to one server, by node, and the threads that use them."""

    def __init__(self, address: Address, name_of: Callable[[Node | None], str]) -> None:
        self._address = address
        self._name_of = name_of
        self._idle: dict[Node | None, list[Wire]] = {}
        self._threads: ThreadPoolExecutor | None = None

    async def use(self, node: Node | None, work: Callable[[Wire], R]) -> R:
        """Have a thread do something over a connection to a node.

        Cancelling it breaks the connection off; no memory of the caller's is touched after it has returned.

        Raises:
            BrokerUnavailable: the connection cannot be made, or was lost; how much was done is not known.
            BrokerError: what ``work`` raises.
        """
        if self._threads is None:
            self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="taskmesh bulk")
        task = _Use(self, node, work)
        running = asyncio.get_running_loop().run_in_executor(self._threads, task.run)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            task.interrupt()
            await asyncio.wait([running])
            if not running.cancelled():
                running.exception()
            raise

    def take(self, node: Node | None) -> Wire:
        """A connection that nobody uses. Any thread."""
        with contextlib.suppress(KeyError, IndexError):
            return self._idle[node].pop()
        where = self._name_of(node)
        connection_class = getattr(blocking, self._address.connection.__name__)
        place = {} if node is None else {"host": node[0], "port": node[1]}
        connection = connection_class(**{**self._address.arguments, **place})
        try:
            connection.connect()
        except (redis_errors.RedisError, OSError) as error:
            raise error_of_connection(error, where) from None
        return Wire(connection, where)

    def give(self, node: Node | None, wire: Wire) -> None:
        """It may be used again. Any thread."""
        idle = self._idle.setdefault(node, [])
        if len(idle) < IDLE and self._threads is not None:
            idle.append(wire)
        else:
            wire.close()

    def close(self) -> None:
        """End the connections."""
        threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown(wait=False)
        for idle in self._idle.values():
            for wire in idle:
                wire.close()
        self._idle.clear()


class _Use:
    """One use of a connection."""

    def __init__(self, sockets: Sockets, node: Node | None, work: Callable[[Wire], Any]) -> None:
        self._sockets = sockets
        self._node = node
        self._work = work
        self._wire: Wire | None = None
        self._interrupted = False

    def run(self) -> Any:
        if self._interrupted:
            return None
        wire = self._wire = self._sockets.take(self._node)
        try:
            if self._interrupted:
                raise _Lost("given up")
            done = self._work(wire)
        except _Lost as error:
            wire.close()
            raise BrokerUnavailable(str(error)) from None
        except BrokerError:
            self._sockets.give(self._node, wire)
            raise
        except BaseException:
            wire.close()
            raise
        self._sockets.give(self._node, wire)
        return done

    def interrupt(self) -> None:
        self._interrupted = True
        if self._wire is not None:
            self._wire.interrupt()


def _bulk(value: bytes) -> bytes:
    return b"$%d\r\n%s\r\n" % (len(value), value)
