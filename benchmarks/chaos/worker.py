"""A worker process of the chaos run: serves until SIGTERM, then drains."""

from __future__ import annotations

import asyncio
import signal

from benchmarks.chaos.app import ledger, mesh
from benchmarks.chaos.process import begin
from taskmesh import BrokerError, WorkerSettings

SETTINGS = WorkerSettings(concurrency=16, drain_timeout=5.0)


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        try:
            async with mesh.worker(SETTINGS):
                ledger.write({"what": "ready"})
                await stop.wait()
        except BrokerError:  # the server is away: it could not start
            await asyncio.sleep(0.2)


if __name__ == "__main__":
    begin()
    asyncio.run(main())
