"""The wires between clients and servers, in a process of their own: cut, silent, slow, or cut in mid-reply.

Each server has a listener here, and the clients know no other address: where a server tells the port of another (a
sentinel, a cluster's node), the listener's port takes its place, which has as many digits. Servers talk to each other
past these wires.

The program reads one JSON object with the servers' ports, answers with the listeners' ports, and then carries out one
order a line, each answered with how many connections it struck.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from random import Random
from typing import Any

from benchmarks.chaos.process import begin
from taskmesh.testing import wait_until

CHUNK = 65536


class Wire:
    """One connection, with a pump for each direction."""

    def __init__(
        self, wires: Wires, number: int, client: asyncio.StreamWriter, server: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self._wires = wires
        self._ends = (client, server)
        self.is_silent = False
        self.dies_at_reply = False

    def cut(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def requests(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK):
            if self._wires.replies_to_cut and b"EVALSHA" in data:
                self._wires.replies_to_cut -= 1
                self.dies_at_reply = True
            await self._pass_on(data, self._ends[1])

    async def replies(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(CHUNK):
            if self.dies_at_reply and not self.is_silent:
                # The server has acted; the client gets a piece of the answer, or nothing.
                await self._pass_on(data[: self._wires.draw.randrange(len(data))], self._ends[0])
                self._wires.replies_were_cut += 1
                return
            await self._pass_on(self._wires.rename(data), self._ends[0])

    async def _pass_on(self, data: bytes, end: asyncio.StreamWriter) -> None:
        if self._wires.delay:
            await asyncio.sleep(self._wires.delay)
        if not self.is_silent:
            end.write(data)
            await end.drain()


class Wires:
    """All of them.

    Attributes:
        delay: seconds by which every piece of data is late.
        replies_to_cut: so many of the next script calls lose their replies.
    """

    def __init__(self, seed: int) -> None:
        self.draw = Random(seed)
        self.delay = 0.0
        self.replies_to_cut = 0
        self.replies_were_cut = 0
        self._wires: set[Wire] = set()
        self._made = 0
        self._names: list[tuple[bytes, bytes]] = []

    async def listen(self, ports: list[int]) -> list[int]:
        """A listener for each server; returns their ports."""
        listeners = []
        for port in ports:
            server = await asyncio.start_server(functools.partial(self._accept, port), "127.0.0.1", 0)
            listeners.append(int(server.sockets[0].getsockname()[1]))
            old, new = str(port).encode(), str(listeners[-1]).encode()
            self._names += [
                (b"$5\r\n%b\r\n" % old, b"$5\r\n%b\r\n" % new),
                (b":%b\r\n" % old, b":%b\r\n" % new),
            ]
        return listeners

    def rename(self, data: bytes) -> bytes:
        """The listeners' ports in the place of the servers' (in bulk strings, integers, MOVED and ASK)."""
        if b"127.0.0.1" in data:
            for old, new in self._names:
                data = data.replace(old, new)
        return data

    async def _accept(self, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.transport.abort()
            return
        self._made += 1
        wire = Wire(self, self._made, writer, server_writer)
        self._wires.add(wire)
        pumps = [
            asyncio.create_task(wire.requests(reader)),
            asyncio.create_task(wire.replies(server_reader)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            wire.cut()
            self._wires.discard(wire)

    def _some(self, share: float) -> list[Wire]:
        """So many of the connections; one at least, where there is one."""
        wires = sorted(self._wires, key=lambda wire: wire.number)
        return self.draw.sample(wires, min(len(wires), max(1, round(share * len(wires)))))

    async def obey(self, order: dict[str, Any]) -> int:
        """Carry one order out; returns how many connections it struck."""
        match order["do"]:
            case "cut":
                struck = self._some(order["share"])
                for wire in struck:
                    wire.cut()
            case "half_open":
                struck = self._some(order["share"])
                for wire in struck:
                    wire.is_silent = True
            case "slow":
                struck = list(self._wires)
                self.delay = order["delay"]
            case "reply_cut":
                return await self._cut_replies(order["count"])
            case unknown:
                raise ValueError(unknown)
        return len(struck)

    async def _cut_replies(self, count: int) -> int:
        before = self.replies_were_cut
        self.replies_to_cut = count
        with contextlib.suppress(AssertionError):  # nobody called a script
            await wait_until(lambda: self.replies_were_cut >= before + count, timeout=2.0)
        self.replies_to_cut = 0
        return self.replies_were_cut - before


async def main() -> None:
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    first = json.loads(await lines.readline())
    wires = Wires(first["seed"])
    print(json.dumps(await wires.listen(first["ports"])), flush=True)

    async def carry_out(order: dict[str, Any]) -> None:
        print(json.dumps({"number": order["number"], "struck": await wires.obey(order)}), flush=True)

    orders: set[asyncio.Task[None]] = set()
    while line := await lines.readline():
        task = asyncio.create_task(carry_out(json.loads(line)))
        orders.add(task)
        task.add_done_callback(orders.discard)


if __name__ == "__main__":
    begin()
    asyncio.run(main())
