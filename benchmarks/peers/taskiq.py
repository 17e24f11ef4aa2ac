"""taskiq with taskiq-redis: RedisStreamBroker, one worker process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable

from taskiq_redis import RedisAsyncResultBackend, RedisStreamBroker

from benchmarks.peers.handlers import ASYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, PREFETCH, RESULT_TTL, RESULTS, URL, script

broker = RedisStreamBroker(URL)
if RESULTS:
    broker = broker.with_result_backend(RedisAsyncResultBackend(URL, result_ex_time=RESULT_TTL))
TASKS = {name: broker.task(task_name=name)(handler) for name, handler in ASYNC_HANDLERS.items()}


async def connect() -> None:
    await broker.startup()  # declares the group, at "$": before the first task


async def close() -> None:
    await broker.shutdown()


async def enqueue(task: str, i: int) -> None:
    await TASKS[task].kiq(i)


async def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    await asyncio.gather(*(TASKS[task].kiq(i) for i in ids))


async def roundtrip(i: int) -> int:
    handle = await TASKS["noop"].kiq(i)
    return (await handle.wait_result(check_interval=0.001, timeout=10)).return_value  # polls; default 200 ms


def run_worker() -> None:
    command = [script("taskiq"), "worker", "benchmarks.peers.taskiq:broker", "--log-level", "WARNING"]
    command += ["--workers", "1", "--max-async-tasks", str(CONCURRENCY), "--max-prefetch", str(PREFETCH)]
    os.execv(command[0], command)
