"""A TCP proxy that cuts connections where a test wants it: the server has acted, its reply is lost."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self


class Proxy:
    """Stands between a client and a server on loopback.

    ``cut_reply_after(marker)`` arms it: when a request that contains the marker has gone to the server, the next
    reply on that connection is thrown away and the connection is cut, as often as asked.

    Attributes:
        cuts: how often it did.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._pumps: set[asyncio.Task[None]] = set()
        self._marker: bytes | None = None
        self._cuts_left = 0
        self.cuts = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def cut_reply_after(self, marker: bytes, times: int = 1) -> None:
        """Lose the replies to the next requests that contain ``marker`` (a script's digest, say)."""
        self._marker, self._cuts_left = marker, times

    def cut_all(self) -> None:
        """Cut every connection now."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        wires = (writer, upstream_writer)
        self._writers.update(wires)
        doomed = asyncio.Event()
        pumps = [
            asyncio.create_task(self._requests(reader, upstream_writer, doomed)),
            asyncio.create_task(self._replies(upstream_reader, writer, doomed)),
        ]
        self._pumps.update(pumps)
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._pumps.difference_update(pumps)
            for wire in wires:
                wire.transport.abort()
                self._writers.discard(wire)

    async def _requests(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            if self._marker is not None and self._marker in data and self._cuts_left > 0:
                self._cuts_left -= 1
                doomed.set()
            writer.write(data)
            await writer.drain()

    async def _replies(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, doomed: asyncio.Event
    ) -> None:
        while data := await reader.read(65536):
            if doomed.is_set():  # the server has acted on the request: nobody hears of it
                self.cuts += 1
                return
            writer.write(data)
            await writer.drain()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        self._server.close()
        self.cut_all()
        await self._server.wait_closed()
        while self._pumps:
            await asyncio.wait(list(self._pumps))
