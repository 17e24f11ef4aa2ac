"""celery with Redis as broker and result backend; variants: prefork and threads."""

from __future__ import annotations

import os
from collections.abc import Iterable

from celery import Celery, group

from benchmarks.peers.handlers import SYNC_HANDLERS
from benchmarks.peers.settings import CONCURRENCY, RESULT_TTL, RESULTS, URL, VARIANT, script

app = Celery("peer", broker=URL, backend=URL if RESULTS else None)
app.conf.update(
    task_ignore_result=not RESULTS,
    task_store_errors_even_if_ignored=False,
    worker_prefetch_multiplier=64 if VARIANT == "prefork" else 4,
    worker_disable_rate_limits=True,
    worker_send_task_events=False,
    task_send_sent_event=False,
    result_expires=RESULT_TTL,
    broker_connection_retry_on_startup=True,
    task_default_queue="peer",
)
TASKS = {name: app.task(name=name)(handler) for name, handler in SYNC_HANDLERS.items()}


def connect() -> None:
    """It connects when first used."""


def close() -> None:
    """Its connections end with the process."""


def enqueue(task: str, i: int) -> None:
    TASKS[task].delay(i)


def enqueue_bulk(task: str, ids: Iterable[int]) -> None:
    group(TASKS[task].s(i) for i in ids).apply_async()


def roundtrip(i: int) -> int:
    return TASKS["noop"].delay(i).get(timeout=10)


def run_worker() -> None:
    command = [script("celery"), "-A", "benchmarks.peers.celery", "worker", "-Q", "peer", "-l", "WARNING"]
    command += ["-P", VARIANT, "-c", str(CONCURRENCY)]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    os.execv(command[0], command)
