"""streaq: Redis streams through coredis, anyio on uvloop."""

from __future__ import annotations

from collections.abc import Iterable

from streaq import Worker

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL

worker = Worker(redis_url=URL, concurrency=CONCURRENCY, anyio_kwargs={"use_uvloop": True})
TASKS = {
    name: worker.task(name=name, ttl=RESULT_TTL if RESULTS else 0, silent=True)(handler)
    for name, handler in ASYNC_HANDLERS.items()
}
_opened = worker.__asynccontextmanager__()


async def connect() -> None:
    await _opened.__aenter__()


async def close() -> None:
    await _opened.__aexit__(None, None, None)


async def enqueue(task: str, i: int) -> None:
    await TASKS[task].enqueue(i)


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    await worker.enqueue_many([TASKS[task].enqueue(i) for i in ids])


async def roundtrip(i: int) -> int:
    handle = await TASKS["noop"].enqueue(i)
    return (await handle.result(10)).result


def run_worker() -> None:
    worker.run_sync()
