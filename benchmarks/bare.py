"""What the machine itself allows, with no framework in the way: the bare event loop and the bare round trip.

python -m benchmarks.bare          both figures, as JSON
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import uvloop
from redis.asyncio import Redis

from benchmarks.measure import WARMUP, percentile
from benchmarks.processes import ROOT
from benchmarks.servers import Server

STREAM, GROUP, REPLIES = "bare:tasks", "g", "bare:replies"
RESULT_TTL = 600
BLOCK_MS = 5000
SETTLE = Path(__file__).with_name("bare_settle.lua")


def sleeps_per_s(seconds: float, concurrency: int = 100) -> float:
    """10 ms sleeps that a bare uvloop ends a second, with `concurrency` coroutines sleeping in turn."""

    async def sleeper(until: float) -> int:
        count = 0
        while time.perf_counter() < until:
            await asyncio.sleep(0.01)
            count += 1
        return count

    async def main() -> float:
        began = time.perf_counter()
        counts = await asyncio.gather(*(sleeper(began + seconds) for _ in range(concurrency)))
        return sum(counts) / (time.perf_counter() - began)

    return uvloop.run(main())


async def _work(url: str) -> None:
    """The worker: one entry at a time, blocking read, then the settle script. It runs until it is killed."""
    client = Redis.from_url(url, protocol=2)  # one shape of reply, whatever the client's default
    digest = await client.script_load(SETTLE.read_text())
    while True:
        answer: Any = await client.xreadgroup(GROUP, "worker", {STREAM: ">"}, count=1, block=BLOCK_MS)
        for entry, fields in answer[0][1] if answer else ():
            value = fields[b"i"]
            keys = (STREAM, REPLIES, b"bare:result:" + value)
            await client.evalsha(digest, 3, *keys, GROUP, entry, value, RESULT_TTL)


async def _ask(url: str, count: int) -> list[float]:
    """The client: one round trip at a time, waiting in a blocking read of the replies."""
    client = Redis.from_url(url, protocol=2)
    samples: list[float] = []
    last: bytes | str = "0-0"
    for i in range(WARMUP + count):
        began = time.perf_counter()
        await client.xadd(STREAM, {"i": str(i)})
        answer: Any = None
        while not answer:
            answer = await client.xread({REPLIES: last}, count=1, block=BLOCK_MS)
        last = answer[0][1][0][0]
        if i >= WARMUP:
            samples.append(time.perf_counter() - began)
    await client.aclose()
    return samples


def round_trips(count: int, *, persistent: bool) -> list[float]:
    """Seconds of each bare round trip between two processes: XADD, XREADGROUP, settle script, XREAD."""
    with Server(persistent=persistent) as server:
        server.client.xgroup_create(STREAM, GROUP, id="0", mkstream=True)
        command = [sys.executable, "-m", "benchmarks.bare", "worker", server.url]
        worker = subprocess.Popen(command, cwd=ROOT)
        try:
            return uvloop.run(_ask(server.url, count))
        finally:
            worker.kill()
            worker.wait()


def repeat(seconds: float, count: int, *, persistent: bool) -> dict[str, float | None]:
    """Both bare figures once."""
    samples = round_trips(count, persistent=persistent)
    return {
        "bare_sleep_10ms_per_s": sleeps_per_s(seconds),
        "bare_round_trip_p50_s": percentile(samples, 0.5),
        "bare_round_trip_p99_s": percentile(samples, 0.99),
    }


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        uvloop.run(_work(sys.argv[2]))
    else:
        print(json.dumps(repeat(2.0, 1000, persistent=False), indent=2))


if __name__ == "__main__":
    main()
