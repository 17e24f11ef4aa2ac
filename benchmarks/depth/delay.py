"""A proxy that makes the wire longer:  python -m benchmarks.depth.delay PORT SECONDS

It passes bytes between whoever connects and the server at PORT, SECONDS later in each direction, and keeps their order.
A process of its own; it prints its own port and ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import subprocess
import sys
from collections import deque
from types import TracebackType
from typing import Self

from benchmarks.processes import ROOT, SideFailed

MOST_ON_THE_WAY = 64 * 2**20  # bytes in one direction of a connection before its sender has to wait
START_TIMEOUT = 10.0


class _End(asyncio.Protocol):
    """One of the two sockets of a connection; what it reads leaves through ``other``."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._loop = asyncio.get_running_loop()
        self._late: deque[tuple[float, bytes]] = deque()  # what is still to be written here
        self._size = 0
        self._timer: asyncio.TimerHandle | None = None
        self._paused = False
        self.transport: asyncio.Transport | None = None
        self.other: _End | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=MOST_ON_THE_WAY)

    def data_received(self, data: bytes) -> None:
        assert self.other is not None
        self.other.write_later(data)

    def connection_lost(self, error: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._late.clear()
        if self.other is not None and self.other.transport is not None:
            self.other.transport.abort()

    def write_later(self, data: bytes) -> None:
        """Write it here when it has been on its way for long enough."""
        if not self._delay:
            self._write(data)
            return
        self._late.append((self._loop.time() + self._delay, data))
        self._size += len(data)
        if self._timer is None:
            self._timer = self._loop.call_later(self._delay, self._write_due)
        if self._size > MOST_ON_THE_WAY:
            self._pause_sender()

    def _write_due(self) -> None:
        self._timer = None
        now = self._loop.time()
        due = []
        while self._late and self._late[0][0] <= now:
            due.append(self._late.popleft()[1])
        data = due[0] if len(due) == 1 else b"".join(due)
        self._size -= len(data)
        self._write(data)
        if self._late:
            self._timer = self._loop.call_at(self._late[0][0], self._write_due)
        if self._paused and self._size < MOST_ON_THE_WAY // 2:
            self.resume_writing()

    def _write(self, data: bytes) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.write(data)

    def _pause_sender(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self._paused = True
            self.other.transport.pause_reading()

    def pause_writing(self) -> None:
        self._pause_sender()

    def resume_writing(self) -> None:
        if self.other is not None and self.other.transport is not None:
            self._paused = False
            self.other.transport.resume_reading()


class _Door(_End):
    """The end that faces the client; it makes the other one."""

    def __init__(self, delay: float, port: int) -> None:
        super().__init__(delay)
        self._port = port
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        assert self.transport is not None
        self.transport.pause_reading()
        self._task = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        assert self.transport is not None
        end = _End(self._delay)
        end.other = self
        try:
            await self._loop.create_connection(lambda: end, "127.0.0.1", self._port)
        except OSError:
            self.transport.abort()
            return
        self.other = end
        self.transport.resume_reading()


async def _serve(port: int, delay: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Door(delay, port), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    loop.add_reader(sys.stdin, ended.set)
    await ended.wait()


def main() -> None:
    """Serve until the standard input ends."""
    # select(2) alone waits to the microsecond; epoll and uvloop round a delay of 1 ms up to 2.
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selectors.SelectSelector())) as runner:
        runner.run(_serve(int(sys.argv[1]), float(sys.argv[2])))


class Delay:
    """``with Delay(port, one_way) as delay:`` a proxy process; ``delay.url`` leads through it."""

    def __init__(self, port: int, one_way: float) -> None:
        self._arguments = [str(port), str(one_way)]
        self._process: subprocess.Popen[bytes] | None = None
        self.port = 0

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.depth.delay", *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.__exit__(None, None, None)
            raise SideFailed("the delaying proxy did not start")
        self.port = int(line)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(START_TIMEOUT)


if __name__ == "__main__":
    main()
