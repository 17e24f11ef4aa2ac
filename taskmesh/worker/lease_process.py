"""The heartbeat as a process of its own: ``python -m taskmesh.worker.lease_process``, a worker's child.

It hears its plan and all else from the worker on its standard input, and ends when that ends. It does not beat for a
worker that is stopped (SIGSTOP, a debugger): whoever does not run holds no lease.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from pathlib import Path

import msgspec

from taskmesh.broker.liveness import Beat
from taskmesh.worker.lease import Keeper, Plan, Report, Word

CHECK = 0.2
STOPPED = ("T", "t", "Z", "X")


class LeaseProcess:
    """Keeps the lease while the worker runs."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._word = Word([b"" for _ in plan.places], 0, None, time.monotonic())

    def name_in(self, number: int) -> bytes:
        return b"" if self._is_stopped() else self._word.names[number]

    def _is_stopped(self) -> bool:
        try:
            status = Path(f"/proc/{self._plan.worker_pid}/stat").read_text()
        except OSError:
            return os.getppid() != self._plan.worker_pid  # no /proc on this system
        return status.rpartition(")")[2].split()[0] in STOPPED

    def report(self, number: int, beat: Beat) -> None:
        try:
            os.write(1, msgspec.json.encode(Report(number, beat)) + b"\n")
        except BlockingIOError:  # the worker has not read for minutes: the lease goes first
            pass

    def listen(self) -> None:
        """Follow the worker's words; end this process with it."""
        for line in sys.stdin.buffer:
            self._word = msgspec.json.decode(line, type=Word)
        os._exit(0)

    async def run(self) -> None:
        plan = self._plan
        keeper = Keeper(
            plan.url, plan.places, plan.ttl, self.name_in, lambda: self._word.offset_ms, self.report
        )
        keeping = asyncio.create_task(keeper.run())
        while not keeping.done():
            await asyncio.wait([keeping], timeout=CHECK)
            self._end_a_blocked_worker()
        await keeping

    def _end_a_blocked_worker(self) -> None:
        word = self._word
        silent = time.monotonic() - word.said
        if word.patience is not None and silent > word.patience and not self._is_stopped():
            os.write(2, b"taskmesh: the worker has been blocked for too long; it is killed\n")
            os.kill(self._plan.worker_pid, signal.SIGKILL)
            os._exit(0)


def main() -> None:
    """Keep the lease that the first line of the standard input describes."""
    os.set_blocking(1, False)
    process = LeaseProcess(msgspec.json.decode(sys.stdin.buffer.readline(), type=Plan))
    threading.Thread(target=process.listen, daemon=True).start()
    asyncio.run(process.run())


if __name__ == "__main__":
    main()
