"""The real server, as the simulated connections reach it.

Every command is run by the server itself. Three things are not its own here: the time that scripts read (virtual),
which scripts it has cached (forgotten with every schedule), and the waiting of blocking reads: they are asked again
whenever something was written that they might be waiting for.
"""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import hiredis

from taskmesh.broker import scripts
from taskmesh.broker.link import Command, error_of_reply
from taskmesh.broker.scripts import Script
from taskmesh.errors import BrokerError
from taskmesh.testing import RedisServer
from tests.schedules.loop import EPOCH_MS, Timeline

WHERE = "the simulated server"
BLOCKED = object()
# What may end a blocking read: those that write to a lane, to the control stream or to a reply stream.
_WAKING = frozenset({"submit", "promote", "requeue", "join", "leave", "cancel", "settle", "hand_back"})
_CLOCK = b"redis.call('TIME')"
_CHOICE = b"(tonumber(ms) + tonumber(sequence))"  # by an entry's id, which has the server's real time in it
Mutations = Mapping[str, Sequence[tuple[str, str]]]


def new_server() -> RedisServer:
    """A server for schedules. ``start`` it."""
    # Small hashes keep the order of their making; in others it is drawn anew with every start of a server.
    return RedisServer(options={"hash-max-listpack-value": "65536"})


class Backend:
    """One connection to a real server that holds nothing else, and the scripts as they are run there.

    Args:
        mutations: by script, texts of it and what stands in their place: faults that the tests must find.
    """

    def __init__(self, port: int, mutations: Mutations | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        self.by_sha: dict[bytes, tuple[str, bytes]] = {}
        self.by_source: dict[bytes, bytes] = {}
        self._sources: list[bytes] = []
        for script in vars(scripts).values():
            if isinstance(script, Script):
                self._adapt(script, mutations or {})
        self.load()

    def _adapt(self, script: Script, mutations: Mutations) -> None:
        source = script.source.replace(_CLOCK, b"{0, 0}").replace(_CHOICE, b"(0)")
        for old, new in mutations.get(script.name, ()):
            assert old.encode() in source, (
                f"{script.name}.lua has changed: the mutation does not fit any more"
            )
            source = source.replace(old.encode(), new.encode())
        sha = hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()
        self.by_sha[script.sha] = (script.name, sha)
        self.by_source[script.source] = script.sha
        self._sources.append(source)

    def load(self) -> None:
        self.run(*(("SCRIPT", "LOAD", source) for source in self._sources))

    def run(self, *commands: Command) -> list[Any]:
        """Replies, in order; an error reply stands there as a ReplyError."""
        self._socket.sendall(b"".join(map(hiredis.pack_command, commands)))
        replies: list[Any] = []
        gets = self._reader.gets
        while True:
            while (reply := gets()) is not False:
                replies.append(reply)
                if len(replies) == len(commands):
                    return replies
            self._reader.feed(self._socket.recv(65536))

    def close(self) -> None:
        self._socket.close()


class Reader(Protocol):
    """A connection whose head command is a blocking read."""

    def unblock(self, reply: Any) -> None: ...


class Blocked:
    """A blocking read that waits at the server."""

    __slots__ = ("command", "connection")

    def __init__(self, connection: Reader, command: Command) -> None:
        self.connection = connection
        self.command = command


class Node:
    """The server in one schedule.

    Args:
        saw: hears of every script that was run: its name, keys, arguments, reply.

    Attributes:
        is_up: it accepts connections.
        resumes_at: it is stopped until then.
        jumped_ms: how far its clock has been set forward.
    """

    def __init__(self, backend: Backend, timeline: Timeline, saw: Callable[..., None]) -> None:
        self._backend = backend
        self._timeline = timeline
        self._saw = saw
        self._cached: set[bytes] = set()
        self._blocked: list[Blocked] = []
        self.watched: dict[bytes, Any] = {}
        self.is_up = True
        self.resumes_at = 0.0
        self.jumped_ms = 0

    @property
    def now_ms(self) -> int:
        return EPOCH_MS + int(self._timeline.now * 1000) + self.jumped_ms

    def forget_scripts(self) -> None:
        self._cached.clear()

    def forget(self, connection: Reader) -> None:
        """The connection is gone, and what it waited for."""
        self._blocked = [waiting for waiting in self._blocked if waiting.connection is not connection]

    def execute(self, connection: Any, command: Command) -> Any:
        """The reply; BLOCKED when it comes later, with ``unblock``."""
        name = command[0]
        if name == "EVALSHA":
            return self._evalsha(command)
        if name == "EVAL":
            sha = self._backend.by_source[command[1]]  # type: ignore[index]
            self._cached.add(sha)
            return self._evalsha(("EVALSHA", sha, *command[2:]))
        if name == "SCRIPT":
            sha = self._backend.by_source[command[2]]  # type: ignore[index]
            self._cached.add(sha)
            return sha
        if name == "TIME":
            seconds, ms = divmod(self.now_ms, 1000)
            return [str(seconds).encode(), str(ms * 1000).encode()]
        if name == "CLIENT":
            return connection.number if command[1] == "ID" else self._unblock(command[2])
        if "BLOCK" in command:
            return self._read(connection, command)
        return self._reply(self._backend.run(command)[0])

    def _reply(self, reply: Any) -> Any:
        return error_of_reply(str(reply), WHERE) if isinstance(reply, hiredis.ReplyError) else reply

    def _evalsha(self, command: Command) -> Any:
        sha, count = command[1], int(command[2])  # type: ignore[arg-type]
        if sha not in self._cached:
            return error_of_reply("NOSCRIPT No matching script.", WHERE)
        name, real = self._backend.by_sha[sha]  # type: ignore[index]
        offset_ms = int(command[3 + count])  # type: ignore[arg-type]
        head, rest = command[3 : 3 + count], command[4 + count :]
        reply, *looks = self._backend.run(
            ("EVALSHA", real, count, *head, self.now_ms + offset_ms, *rest), *self._looks(name, head)
        )
        reply = self._reply(reply)
        if not isinstance(reply, BrokerError):
            self._saw(name, head, rest, reply, looks)
            if name in _WAKING and not (name == "promote" and reply[0] == 0):
                self._wake()
        return reply

    def _looks(self, name: str, keys: Sequence[Any]) -> list[Command]:
        """What is asked behind a script, in the same breath, to see what it has done."""
        if name in ("settle", "cancel"):
            return [("XRANGE", stream, b"(" + last, "+") for stream, last in self.watched.items()]
        if name == "submit":
            return [("ZCARD", keys[3]), *(("XLEN", lane) for lane in keys[:3])]
        return []

    # blocking reads

    def _read(self, connection: Any, command: Command) -> Any:
        at = command.index("BLOCK")
        plain = command[:at] + command[at + 2 :]
        reply = self._reply(self._backend.run(plain)[0])
        if reply is not None:
            return reply
        waiting = Blocked(connection, plain)
        self._blocked.append(waiting)
        self._timeline.at(self._timeline.now + int(command[at + 1]) / 1000, self._expire, waiting)
        return BLOCKED

    def _expire(self, waiting: Blocked) -> None:
        if waiting in self._blocked:
            self._blocked.remove(waiting)
            waiting.connection.unblock(None)

    def _unblock(self, number: Any) -> int:
        for waiting in self._blocked:
            if waiting.connection.number == number:  # type: ignore[attr-defined]
                self._expire(waiting)
                return 1
        return 0

    def _wake(self) -> None:
        if not self._blocked:
            return
        asked = list(self._blocked)
        for waiting, reply in zip(asked, self._backend.run(*(each.command for each in asked)), strict=True):
            if reply is not None:
                self._blocked.remove(waiting)
                waiting.connection.unblock(self._reply(reply))

    # what the test itself wants to know

    def ask(self, *commands: Command) -> list[Any]:
        return self._backend.run(*commands)


def message_id(data: bytes) -> str:
    """The id in a message's head."""
    return re.sub(rb"[^ -~]", b"?", data[2:22]).decode()
