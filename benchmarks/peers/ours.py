"""taskmesh itself, through its public API, like every other side."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterable

import redis

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL
from taskmesh import Mesh, MeshSettings, WorkerSettings

LIVENESS_TTL_S = float(os.environ.get("BENCH_TTL", "2.0"))
settings = MeshSettings(url=URL, liveness_ttl=LIVENESS_TTL_S, result_ttl=RESULT_TTL if RESULTS else 0)
mesh = Mesh("bench", settings=settings)
TASKS = {name: mesh.task(name=name)(handler) for name, handler in ASYNC_HANDLERS.items()}


async def connect() -> None:
    await mesh.__aenter__()


async def close() -> None:
    await mesh.__aexit__(None, None, None)


async def enqueue(task: str, i: int) -> None:
    await TASKS[task].submit(i)


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    await TASKS[task].submit_many(ids)


async def enqueue_delayed(task: str, i: int, delay_s: float) -> None:
    await TASKS[task].submit_in(delay_s, i)


async def roundtrip(i: int) -> int:
    handle = await TASKS["noop"].submit(i)
    return await handle.result(timeout=10)


def pending(client: redis.Redis) -> int:
    return sum(client.xlen(f"taskmesh:{{bench:default:0}}:tasks:{lane}") for lane in ("high", "normal", "low"))


async def _serve() -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    async with mesh.worker(WorkerSettings(concurrency=CONCURRENCY)):
        await stopped.wait()


def run_worker() -> None:
    import uvloop

    uvloop.run(_serve())
