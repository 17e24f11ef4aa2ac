"""huey on Redis; variants: thread and greenlet."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from benchmarks.peers.settings import CONCURRENCY, RESULTS, URL, VARIANT

if VARIANT == "greenlet" and sys.argv[2:3] == ["worker"]:
    from gevent import monkey

    monkey.patch_all()  # before anything else imports what it patches

from huey import RedisHuey

from benchmarks.peers.handlers import SYNC_HANDLERS

queue = RedisHuey("peer", url=URL, results=RESULTS, notify_result=RESULTS)
TASKS = {name: queue.task(name=name)(handler) for name, handler in SYNC_HANDLERS.items()}


def connect() -> None:
    """It connects when first used."""


def close() -> None:
    """Its connections end with the process."""


def enqueue(task: str, i: int) -> None:
    TASKS[task](i)


def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    TASKS[task].map(ids)


def roundtrip(i: int) -> int:
    return TASKS["noop"](i).get(blocking=True, timeout=10)


def run_worker() -> None:
    queue.create_consumer(workers=CONCURRENCY, worker_type=VARIANT, periodic=False).run()
