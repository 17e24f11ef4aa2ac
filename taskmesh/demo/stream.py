"""The demo's stream of rows to score: flat out, and at a steady rate."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from itertools import cycle
from typing import NamedTuple

from taskmesh.demo import app
from taskmesh.results.collector import Collector

IN_FLIGHT = 4000
CHUNK = 500
TICK = 0.01


class Scored(NamedTuple):
    """Rows that got their scores. Latencies run from the moment at which a row was due to be sent."""

    rows: int
    rows_per_s: float
    p99_s: float


async def score_flat_out(seconds: float) -> Scored:
    """As many rows as it takes, with a bounded number under way."""
    rows = _rows()
    loop = asyncio.get_running_loop()
    collector: Collector[object] = Collector()
    started = loop.time()
    scored = 0
    while loop.time() - started < seconds or collector.open:
        while loop.time() - started < seconds and collector.open <= IN_FLIGHT - CHUNK:
            for handle in await app.score.submit_many([next(rows) for _ in range(CHUNK)]):
                collector.add(handle)
        await (await collector.next()).result()
        scored += 1
    return Scored(scored, scored / (loop.time() - started), 0.0)


async def score_at_a_rate(rate: float, seconds: float) -> Scored:
    """Rows sent on schedule, whether or not the scores keep up; a late send counts against the row."""
    rows = _rows()
    loop = asyncio.get_running_loop()
    latencies: list[float] = []
    waits: set[asyncio.Task[None]] = set()
    started = loop.time()

    async def send(due: float, count: int) -> None:
        for handle in await app.score.submit_many([next(rows) for _ in range(count)]):
            await handle.result()
            latencies.append(loop.time() - due)

    sent = 0
    for tick in range(int(seconds / TICK)):
        due = started + tick * TICK
        await asyncio.sleep(max(0.0, due - loop.time()))
        count = round((tick + 1) * TICK * rate) - sent
        sent += count
        if count:
            waits.add(asyncio.create_task(send(due, count)))
    await asyncio.gather(*waits)
    latencies.sort()
    p99 = latencies[max(0, math.ceil(len(latencies) * 0.99) - 1)]
    return Scored(len(latencies), len(latencies) / (loop.time() - started), p99)


def _rows() -> Iterator[list[float]]:
    return cycle(app.images[-app.HELD_OUT :].tolist())
