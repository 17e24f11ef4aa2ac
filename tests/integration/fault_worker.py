"""A worker process for the fault tests: it notes every execution in a ledger outside Redis, and dies where told."""

from __future__ import annotations

import asyncio
import os
import signal

from taskmesh import Context, Mesh, WorkerSettings
from taskmesh.testing import arm_from_environment

mesh = Mesh("faults")
if os.environ.get("UNLOADABLE") and __name__ != "__main__":
    raise RuntimeError("a process cannot have this")
LEDGER = os.environ.get("LEDGER", os.devnull)


def note(*words: object) -> None:
    """One line, appended in one write: it is there whatever happens next."""
    fd = os.open(LEDGER, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(fd, (" ".join(map(str, words)) + "\n").encode())
    os.close(fd)


@mesh.task
async def work(ctx: Context, n: int, seconds: float = 0.0) -> int:
    note("work", n, os.getpid(), ctx.deliveries)
    if seconds:
        await asyncio.sleep(seconds)
    return n


@mesh.task
async def who(ctx: Context, seconds: float) -> int:
    """Sleeps in small steps, so that a stopped process goes on where it was."""
    note("who", 0, os.getpid(), ctx.deliveries)
    for _ in range(int(seconds / 0.01)):
        await asyncio.sleep(0.01)
    return os.getpid()


@mesh.task
async def poison(ctx: Context) -> None:
    note("poison", 0, os.getpid(), ctx.deliveries)
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


def hide() -> None:
    """Tasks that no process can import."""

    @mesh.task
    async def hidden_work(ctx: Context, n: int, seconds: float = 0.0) -> int:
        note("hidden_work", n, os.getpid(), ctx.deliveries)
        await asyncio.sleep(seconds)
        return n

    @mesh.task
    async def hidden_poison(ctx: Context) -> None:
        note("hidden_poison", 0, os.getpid(), ctx.deliveries)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)


if os.environ.get("HIDDEN"):
    hide()


async def main() -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    arm_from_environment(mesh)
    settings = WorkerSettings(concurrency=int(os.environ.get("CONCURRENCY", "10")))
    async with mesh.worker(settings):
        print("ready", flush=True)
        await stopped.wait()
    print("stopped", flush=True)


if __name__ == "__main__":
    asyncio.run(main())
