"""The processes of those runs:  python -m benchmarks.depth.programs worker HEARTBEAT CONCURRENCY
                               python -m benchmarks.depth.programs feed RATE

A worker serves until SIGTERM. A feed submits no-ops at a steady rate until its standard input ends, waits for the
results of a few of them, and prints what it did in a line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Literal

import uvloop

from benchmarks.depth.app import make_mesh
from benchmarks.processes import ROOT
from taskmesh import WorkerSettings

Heartbeat = Literal["thread", "process"]
BATCH_SECONDS = 0.01
SAMPLE_EVERY = 100  # batches of which one is waited for
MOST_BEHIND = 1.0


async def _work(heartbeat: Heartbeat, concurrency: int) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    mesh = make_mesh(dict(os.environ))
    async with mesh, mesh.worker(WorkerSettings(heartbeat=heartbeat, concurrency=concurrency)):
        await stopped.wait()


async def _feed(rate: float) -> dict[str, float]:
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    submitted = read = batches = 0
    async with make_mesh(dict(os.environ)) as mesh:
        task = mesh.get_task("noop")
        began = time.monotonic()
        while not ended.is_set():
            due = int((time.monotonic() - began) * rate) - submitted
            if due > MOST_BEHIND * rate:  # held up: what was missed is not made up for
                began += due / rate
                due = 0
            handles = await task.submit_many(range(submitted, submitted + due))
            submitted += due
            batches += 1
            if batches % SAMPLE_EVERY == 0:
                read += len([await handle.result(timeout=60) for handle in handles])
            await asyncio.sleep(BATCH_SECONDS)
        seconds = time.monotonic() - began
    return {"submitted": submitted, "results_read": read, "per_s": submitted / seconds}


def start_worker(
    told: dict[str, str], heartbeat: Heartbeat = "thread", concurrency: int = 100
) -> subprocess.Popen[bytes]:
    """A worker process; its standard input and output are nobody's."""
    return subprocess.Popen(
        _command("worker", heartbeat, concurrency),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **told},
        cwd=ROOT,
    )


def start_feed(told: dict[str, str], rate: float) -> subprocess.Popen[bytes]:
    """A feed; it ends when its standard input is closed."""
    return subprocess.Popen(
        _command("feed", rate),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **told},
        cwd=ROOT,
    )


def _command(*words: object) -> list[str]:
    return [sys.executable, "-m", "benchmarks.depth.programs", *map(str, words)]


def main() -> None:
    """One of the programs."""
    match sys.argv[1:]:
        case ["worker", "thread" | "process" as heartbeat, concurrency]:
            uvloop.run(_work(heartbeat, int(concurrency)))
        case ["feed", rate]:
            print(json.dumps(uvloop.run(_feed(float(rate)))), flush=True)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
