"""saq on Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import uvloop
from saq import Queue, Worker

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL

TTL = RESULT_TTL if RESULTS else -1
queue = Queue.from_url(URL, max_concurrent_ops=100)


def _with_context(handler: Any) -> Any:
    async def run(context: dict[str, Any], *, i: int) -> int:
        return await handler(i)

    return run


async def connect() -> None:
    await queue.connect()


async def close() -> None:
    await queue.disconnect()


async def enqueue(task: str, i: int) -> None:
    await queue.enqueue(task, i=i, ttl=TTL)


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    await asyncio.gather(*(queue.enqueue(task, i=i, ttl=TTL) for i in ids))


async def roundtrip(i: int) -> int:
    return await queue.apply("noop", timeout=10, poll_interval=0.002, i=i)  # polls; default 500 ms


async def _work() -> None:
    await queue.connect()
    functions = [(name, _with_context(handler)) for name, handler in ASYNC_HANDLERS.items()]
    await Worker(queue, functions=functions, concurrency=CONCURRENCY).start()


def run_worker() -> None:
    uvloop.run(_work())
