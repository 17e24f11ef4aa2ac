"""arq, polling every 10 ms (default 500 ms)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import uvloop
from arq import create_pool
from arq.connections import ArqRedis, RedisSettings
from arq.worker import Worker, func

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL

SETTINGS = RedisSettings.from_dsn(URL)
pool: ArqRedis


def _with_context(handler: Any) -> Any:
    async def run(context: dict[str, Any], i: int) -> int:
        return await handler(i)

    return run


async def connect() -> None:
    global pool
    pool = await create_pool(SETTINGS)


async def close() -> None:
    await pool.aclose()


async def enqueue(task: str, i: int) -> None:
    await pool.enqueue_job(task, i)


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    await asyncio.gather(*(pool.enqueue_job(task, i) for i in ids))


async def roundtrip(i: int) -> int:
    job = await pool.enqueue_job("noop", i)
    return await job.result(timeout=10, poll_delay=0.001)  # polls; default 500 ms


def run_worker() -> None:
    asyncio.set_event_loop(uvloop.new_event_loop())
    functions = [func(_with_context(handler), name=name) for name, handler in ASYNC_HANDLERS.items()]
    Worker(
        functions=functions,
        redis_settings=SETTINGS,
        max_jobs=CONCURRENCY,
        poll_delay=0.01,
        keep_result=RESULT_TTL if RESULTS else 0,
        log_results=False,
    ).run()
