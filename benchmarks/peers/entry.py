"""One child process of the benchmark, of any side:  python -m benchmarks.peers.entry SIDE COMMAND ...

    worker                        run a worker until it is ended by a signal
    produce TASK N                queue N tasks, 100 at a time; answers the seconds it took
    latency WARMUP N SECONDS      up to N round trips one at a time, for SECONDS at most; answers the samples
    delayed TASK N DELAY WAITING  queue N tasks for DELAY seconds later, behind WAITING that are not due for
                                  long; answers when each is due (monotonic)

The answer is a line "RESULT {json}" on stdout.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import os
import sys
import time
from typing import Any

BULK = 100
LONG_DELAY = 3600.0


async def _done(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


async def produce(side: Any, task: str, count: int) -> dict[str, Any]:
    began = time.perf_counter()
    for first in range(0, count, BULK):
        await _done(side.enqueue_bulk(task, range(first, min(count, first + BULK))))
    return {"seconds": time.perf_counter() - began}


async def latency(side: Any, warmup: int, count: int, seconds: float) -> dict[str, Any]:
    for i in range(warmup):
        await asyncio.wait_for(_done(side.roundtrip(i)), 30)
    samples: list[float] = []
    limit = time.perf_counter() + seconds
    for i in range(count):
        began = time.perf_counter()
        await _done(side.roundtrip(i))
        ended = time.perf_counter()
        samples.append(ended - began)
        if ended > limit:
            break
    return {"samples": samples}


async def delayed(side: Any, task: str, count: int, delay: float, waiting: int) -> dict[str, Any]:
    for first in range(0, waiting, 1000):
        later = range(first, min(waiting, first + 1000))
        await asyncio.gather(*(_done(side.enqueue_delayed(task, 0, LONG_DELAY)) for _ in later))
    due: list[float] = []
    for i in range(count):
        due.append(time.monotonic() + delay)
        await _done(side.enqueue_delayed(task, i, delay))
    return {"due": due}


async def _produce_side(side: Any, command: str, arguments: list[str]) -> dict[str, Any]:
    await _done(side.connect())
    try:
        if command == "produce":
            return await produce(side, arguments[0], int(arguments[1]))
        if command == "latency":
            return await latency(side, int(arguments[0]), int(arguments[1]), float(arguments[2]))
        if command == "delayed":
            return await delayed(side, arguments[0], int(arguments[1]), float(arguments[2]), int(arguments[3]))
        raise SystemExit(f"unknown command {command!r}")
    finally:
        await _done(side.close())


def main() -> None:
    name, command, *arguments = sys.argv[1:]
    side = importlib.import_module(f"benchmarks.peers.{name}")
    if command == "worker":
        side.run_worker()
        return
    import uvloop

    answer = uvloop.run(_produce_side(side, command, arguments))
    print("RESULT " + json.dumps(answer), flush=True)
    os._exit(0)  # a peer's own threads must not keep the driver waiting


if __name__ == "__main__":
    main()
