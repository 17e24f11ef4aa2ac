"""The Mesh of the chaos run: what producers submit and workers run. Every run of a handler is noted in the ledger.

``CHAOS_LEDGER`` names the process's ledger. With ``CHAOS_OLD`` the process is of an older release that does not know
the task ``novel``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.ledger import Ledger
from taskmesh import Call, Context, Mesh, Next, QueueOptions, Retry
from taskmesh.settings import from_environment

PATIENCE = 4.0  # seconds that a submit keeps trying: shorter than some faults, so that some are given up
QUEUES = ("main", "spread", "side")
ledger = Ledger(Path(os.environ.get("CHAOS_LEDGER", os.devnull)))
_runs = 0


async def note(call: Call, call_next: Next) -> dict[str, Any]:
    """The middleware: a line before the handler and one behind it; what succeeds carries the name of the run."""
    global _runs
    _runs += 1
    context = call.context
    key, run = str(call.args[0]), f"{os.getpid()}.{_runs}"
    about = {"key": key, "id": context.task_id, "run": run}
    more = {"task": context.task, "attempt": context.attempt, "deliveries": context.deliveries}
    ledger.write({"what": "start", **about, **more, "text": context.worker})
    how = "died"
    try:
        value = await call_next(call)
        how = "succeeded"
    except asyncio.CancelledError:
        how = "stopped"
        raise
    except Exception:
        how = "raised"
        raise
    finally:
        ledger.write({"what": "finish", **about, "text": how})
    return {"key": key, "run": run, "value": value}


mesh = Mesh(
    "chaos",
    settings=dataclasses.replace(from_environment(), retry_for=PATIENCE),
    queues={"spread": QueueOptions(partitions=4), "side": QueueOptions(max_length=2000, wait_timeout=5.0)},
    middleware=[note],
)


@mesh.task(queue="main")
async def nap(key: str, seconds: float) -> Any:
    """Sleeps."""
    await asyncio.sleep(seconds)


@mesh.task(queue="spread")
async def doze(key: str, seconds: float) -> Any:
    """The same, on the queue with partitions."""
    await asyncio.sleep(seconds)


@mesh.task(queue="side", retry=Retry(attempts=4, delay=0.1))
async def flaky(ctx: Context, key: str, fails: int) -> Any:
    """Raises in its first attempts."""
    await asyncio.sleep(0.01)
    if ctx.attempt <= fails:
        raise OSError(f"attempt {ctx.attempt}")


@mesh.task(queue="side")
async def doomed(key: str) -> Any:
    """Raises always."""
    raise ValueError("always")


@mesh.task(queue="main")
async def crunch(key: str, seconds: float) -> Any:
    """Blocks the loop."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


@mesh.task(queue="main")
def in_thread(key: str, seconds: float) -> Any:
    """Sleeps in a thread."""
    time.sleep(seconds)


@mesh.task(queue="side", process=True)
def grind(key: str, seconds: float) -> Any:
    """Keeps a process of its own busy."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        sum(range(1000))


@mesh.task(queue="side")
async def carry(key: str, load: bytes) -> bytes:
    """Takes and returns more than travels inside a message."""
    return load


@mesh.task(queue="main", expires=0.05)
async def brief(key: str) -> Any:
    """Is dropped when it has not started soon."""


@mesh.task(queue="spread", result_ttl=0)
async def silent(key: str) -> Any:
    """Keeps no result."""


if not os.environ.get("CHAOS_OLD"):

    @mesh.task(queue="main")
    async def novel(key: str) -> Any:
        """Is known to some workers alone."""
        await asyncio.sleep(0.01)
