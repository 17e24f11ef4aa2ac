"""Simulated connections: every command on its way to the server and every reply on its way back is a point where
the schedule may step in."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from taskmesh.broker.address import CONNECT_TIMEOUT
from taskmesh.broker.connect import Server
from taskmesh.broker.link import REPLY_TIMEOUT, Command, Link
from taskmesh.errors import BrokerError, BrokerUnavailable
from tests.schedules.node import BLOCKED, WHERE

if TYPE_CHECKING:
    from tests.schedules.world import Process

URL = "redis://127.0.0.1:1/0"


class SimulatedServer(Server):
    """One process's way to the server. All but the links is the engine's own."""

    def __init__(self, process: Process) -> None:
        super().__init__(URL)
        self._process = process

    def _make_link(self, find: Callable[[], Any]) -> Link:
        return Wire(self._process)


async def connect(url: str) -> Server:
    """In place of ``Server.connect``: for the process in whose loop this runs."""
    server = SimulatedServer(asyncio.get_running_loop().process)  # type: ignore[attr-defined]
    await server.link(b"").call("PING")
    return server


class Call:
    """Commands that were sent together."""

    __slots__ = ("commands", "done", "kind", "replies")

    def __init__(self, commands: Sequence[Command], kind: str, done: asyncio.Future[list[Any]]) -> None:
        self.commands = deque(commands)
        self.kind = kind
        self.done = done
        self.replies: list[Any] = []


class Wire(Link):
    """A link: opens a connection when it needs one, and fails what waits on one that is lost."""

    def __init__(self, process: Process) -> None:
        super().__init__(lambda: None)  # type: ignore[arg-type, return-value]
        self.process = process
        self.where = WHERE
        self._line: Connection | None = None

    async def call_many(self, commands: Sequence[Command], timeout: float = REPLY_TIMEOUT) -> list[Any]:
        if self._line is None:
            await self._open()
        line = self._line
        assert line is not None
        loop = asyncio.get_running_loop()
        call = Call(commands, self.process.world.kind_of(commands[0]), loop.create_future())
        late = BrokerUnavailable(f"no answer from {self.where} for {timeout:g} s")
        timer = loop.call_later(timeout, line.give_up, late)
        line.send(call)
        try:
            return await call.done
        finally:
            timer.cancel()

    async def _open(self) -> None:
        async with self._opening:
            if self._closed:
                raise BrokerUnavailable(f"the connection to {self.where} is closed")
            if self._line is not None:
                return
            world = self.process.world
            admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            world.timeline.at(world.timeline.now + world.latency(), self._admit, admitted)
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT):
                    await admitted
            except TimeoutError:
                raise BrokerUnavailable(f"no answer from {self.where}") from None
            self.generation += 1
            self._line = Connection(self)

    def _admit(self, admitted: asyncio.Future[None]) -> None:
        node, timeline = self.process.world.node, self.process.world.timeline
        if admitted.done():
            return
        if not node.is_up:
            admitted.set_exception(BrokerUnavailable(f"no answer from {self.where}: connection refused"))
            admitted.exception()
        elif node.resumes_at > timeline.now:
            timeline.at(node.resumes_at, self._admit, admitted)
        else:
            admitted.set_result(None)

    def lost(self, line: Connection) -> None:
        if self._line is line:
            self._line = None

    def drop(self, reason: str = "dropped") -> None:
        if self._line is not None:
            self._line.give_up(BrokerUnavailable(f"the connection to {self.where} was {reason}"))

    async def close(self) -> None:
        self._closed = True
        self.drop("closed")


class Connection:
    """One connection, from both ends.

    What was sent arrives, in order, even if the sender has given up meanwhile; only a cut loses it.

    Attributes:
        number: its id at the server.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.process = wire.process
        self.world = wire.process.world
        self.number = self.world.next_number()
        self._sent_until = 0.0
        self._read_until = 0.0
        self._held_until = 0.0
        self._arrived: deque[Call] = deque()
        self._waiting: deque[Call] = deque()
        self._refusal: BrokerError | None = None
        self._is_blocked = False
        self._is_served = True
        self._is_read = True
        self.process.connections.append(self)

    # the process's end

    def send(self, call: Call) -> None:
        self._waiting.append(call)
        timeline = self.world.timeline
        self._sent_until = max(self._sent_until + 1e-7, timeline.now + self.world.latency())
        timeline.at(self._sent_until, self._arrive, call)

    def give_up(self, reason: BrokerUnavailable) -> None:
        """Its process closes it: what has been sent is served all the same."""
        self._fail(reason)
        timeline = self.world.timeline
        self._sent_until = max(self._sent_until + 1e-7, timeline.now + self.world.latency())
        timeline.at(self._sent_until, self._end)

    def _fail(self, reason: BrokerUnavailable) -> None:
        self._is_read = False
        self.wire.lost(self)
        if self in self.process.connections:
            self.process.connections.remove(self)
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            if not call.done.done():
                call.done.set_exception(reason)
                call.done.exception()  # its caller may have been cancelled

    def cut(self, why: str = "cut") -> None:
        """Lose what is on its way, in both directions."""
        self._end()
        self._fail(BrokerUnavailable(f"the connection to {self.wire.where} was lost: {why}"))

    # the server's end

    def _end(self) -> None:
        self._is_served = False
        self.world.node.forget(self)

    def _arrive(self, call: Call) -> None:
        if self._is_served:
            self._arrived.append(call)
            self._serve()

    def _serve(self) -> None:
        world = self.world
        while self._arrived and not self._is_blocked and self._is_served:
            wait_until = max(self._held_until, world.node.resumes_at)
            if wait_until > world.timeline.now:
                world.timeline.at(wait_until, self._serve)
                return
            call = self._arrived[0]
            if not call.commands:
                self._arrived.popleft()
                self._answer(call)
                continue
            command = call.commands[0]
            if world.step_in(self, command, "before"):
                continue  # it may be cut off or held now
            call.commands.popleft()
            world.running = self
            if self._refusal is None:
                reply = world.node.execute(self, command)
            else:
                reply, self._refusal = self._refusal, None
            if reply is BLOCKED:
                self._is_blocked = True
                return
            call.replies.append(reply)
            world.step_in(self, command, "after")
            if call.commands and world.is_interrupted():
                world.timeline.at(world.timeline.now, self._serve)
                return

    def unblock(self, reply: Any) -> None:
        """The blocking read at the head has its reply."""
        self._is_blocked = False
        self._arrived[0].replies.append(reply)
        self.world.timeline.at(self.world.timeline.now, self._serve)

    def hold(self, seconds: float, what: str) -> None:
        """Let what goes one way wait: "before" the server, or "after" it."""
        until = self.world.timeline.now + seconds
        if what == "before":
            self._held_until = until
        else:
            self._read_until = max(self._read_until, until)

    def refuse(self, error: BrokerError) -> None:
        """The command at the head is answered so, and not run."""
        self._refusal = error

    def _answer(self, call: Call) -> None:
        timeline = self.world.timeline
        self._read_until = max(self._read_until + 1e-7, timeline.now + self.world.latency())
        timeline.at(self._read_until, self._deliver, call)

    def _deliver(self, call: Call) -> None:
        if self._is_read:
            self._waiting.remove(call)
            if not call.done.done():
                call.done.set_result(call.replies)
