"""dramatiq on Redis: one process, CONCURRENCY threads."""

from __future__ import annotations

import os
from collections.abc import Iterable

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from benchmarks.peers.handlers import SYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL, script

broker = RedisBroker(url=URL)
options = {}
if RESULTS:
    broker.add_middleware(Results(backend=RedisBackend(url=URL), result_ttl=RESULT_TTL * 1000))
    options = {"store_results": True}
dramatiq.set_broker(broker)
TASKS = {name: dramatiq.actor(handler, actor_name=name, **options) for name, handler in SYNC_HANDLERS.items()}


def connect() -> None:
    """It connects when first used."""


def close() -> None:
    """Its connections end with the process."""


def enqueue(task: str, i: int) -> None:
    TASKS[task].send(i)


def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    dramatiq.group([TASKS[task].message(i) for i in ids]).run()


def roundtrip(i: int) -> int:
    return TASKS["noop"].send(i).get_result(block=True, timeout=10_000)


def run_worker() -> None:
    command = [script("dramatiq"), "benchmarks.peers.dramatiq", "--processes", "1"]
    command += ["--threads", str(CONCURRENCY)]
    os.execv(command[0], command)
