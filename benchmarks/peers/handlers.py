"""The work: the same handlers for every side, each with its slot number as its only argument.

noop      marks its slot
suspend   awaits asyncio.sleep(0) once between its marks
nap       10 ms, awaited or slept
slow      50 ms, awaited or slept: so that a kill finds tasks in the middle
"""

from __future__ import annotations

import asyncio
import time

from benchmarks.slots import end, mark, start

NAP = 0.01
SLOW = 0.05


async def noop(i: int) -> int:
    mark(i)
    return i


async def suspend(i: int) -> int:
    start(i)
    await asyncio.sleep(0)
    end(i)
    return i


async def nap(i: int) -> int:
    start(i)
    await asyncio.sleep(NAP)
    end(i)
    return i


async def slow(i: int) -> int:
    start(i)
    await asyncio.sleep(SLOW)
    end(i)
    return i


def sync_noop(i: int) -> int:
    mark(i)
    return i


def sync_nap(i: int) -> int:
    start(i)
    time.sleep(NAP)
    end(i)
    return i


def sync_slow(i: int) -> int:
    start(i)
    time.sleep(SLOW)
    end(i)
    return i


ASYNC_HANDLERS = {"noop": noop, "suspend": suspend, "nap": nap, "slow": slow}
SYNC_HANDLERS = {"noop": sync_noop, "nap": sync_nap, "slow": sync_slow}
