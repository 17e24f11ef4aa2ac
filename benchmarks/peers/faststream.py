"""FastStream on Redis streams: one subscriber with a consumer group for each task. It has no result store."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable

import uvloop
from faststream import FastStream
from faststream.redis import RedisBroker, StreamSub
from redis.asyncio import Redis
from redis.exceptions import ResponseError

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, PREFETCH, URL

broker = RedisBroker(URL, logger=None)
redis = Redis.from_url(URL)
for name, handler in ASYNC_HANDLERS.items():
    stream = StreamSub(f"s:{name}", group="g", consumer=f"c{os.getpid()}", max_records=PREFETCH)
    broker.subscriber(stream=stream, max_workers=CONCURRENCY)(handler)


async def connect() -> None:
    for task in ASYNC_HANDLERS:
        with contextlib.suppress(ResponseError):  # it is there
            await redis.xgroup_create(f"s:{task}", "g", id="0", mkstream=True)  # sees what is queued already
    await broker.connect()


async def close() -> None:
    await broker.stop()
    await redis.aclose()


async def enqueue(task: str, i: int) -> None:
    await broker.publish(i, stream=f"s:{task}")


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    pipeline = redis.pipeline(transaction=False)
    for i in ids:
        await broker.publish(i, stream=f"s:{task}", pipeline=pipeline)
    await pipeline.execute()


async def roundtrip(i: int) -> int:
    reply = await broker.request(i, stream="s:noop", timeout=10)
    return await reply.decode()


def run_worker() -> None:
    uvloop.run(FastStream(broker).run())
