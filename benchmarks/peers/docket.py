"""docket (pydocket), looking for work every 10 ms (default 250 ms)."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import uvloop
from docket import Docket, Worker

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL

docket = Docket(
    name="peer",
    url=f"{URL}?max_connections=1000",  # the client's default of 100 is too few at concurrency 100
    execution_ttl=timedelta(seconds=RESULT_TTL if RESULTS else 0),
)


async def connect() -> None:
    await docket.__aenter__()
    for handler in ASYNC_HANDLERS.values():
        docket.register(handler)


async def close() -> None:
    await docket.__aexit__(None, None, None)


async def enqueue(task: str, i: int) -> None:
    await docket.add(ASYNC_HANDLERS[task])(i)


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    handler = ASYNC_HANDLERS[task]
    await docket.add_many([docket.call(handler)(i) for i in ids])


async def roundtrip(i: int) -> int:
    execution = await docket.add(ASYNC_HANDLERS["noop"])(i)
    return await execution.get_result(timeout=timedelta(seconds=10))


async def _work() -> None:
    await connect()
    interval = timedelta(milliseconds=10)
    async with Worker(docket, concurrency=CONCURRENCY, minimum_check_interval=interval) as worker:
        await worker.run_forever()
    await close()


def run_worker() -> None:
    uvloop.run(_work())
