"""Programs end in silence: no task that was forgotten, no connection left open, whatever way they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from taskmesh.testing import RedisServer

HEAD = """
import asyncio, os, signal, sys, time, logging
from taskmesh import Batch, Mesh, Retry, WorkerSettings
logging.disable(logging.CRITICAL)

mesh = Mesh("exit")

@mesh.task
async def add(a: int, b: int) -> int:
    return a + b

@mesh.task
async def sleep(seconds: float) -> None:
    await asyncio.sleep(seconds)

@mesh.task
def sleep_in_thread(seconds: float) -> None:
    time.sleep(seconds)

@mesh.task(queue="other", retry=Retry(attempts=3, delay=0.01))
async def fail() -> None:
    raise ValueError

@mesh.task(batch=Batch(max_rows=10, max_wait=5))
async def rows(items: list[int]) -> list[int]:
    return items
"""

PROGRAMS = {
    "submit without waiting": """
async def main():
    async with mesh:
        await add.submit(1, 2)
""",
    "submit and wait": """
async def main():
    async with mesh, mesh.worker():
        assert await (await add.submit(1, 2)).result(timeout=5) == 3
        handles = await fail.submit_many([fail.bind()] * 3)
        for handle in handles:
            await handle.outcome(timeout=5)
""",
    "a worker with everything under way": """
async def main():
    async with mesh, mesh.worker(WorkerSettings(drain_timeout=0.1)):
        await sleep.submit_many([30.0] * 5)
        await rows.submit_many([1, 2])
        await sleep.submit_in(30, 1.0)
        handle = await sleep_in_thread.submit(0.5)
        await asyncio.sleep(0.2)
""",
    "a waiter that is left behind": """
async def main():
    async with mesh:
        handle = await add.submit(1, 2)
        waiting = asyncio.create_task(handle.result())
        await asyncio.sleep(0.05)
    try:
        await waiting
    except Exception:
        pass
""",
    "an exception in the block": """
async def main():
    try:
        async with mesh.worker(WorkerSettings(drain_timeout=0.1)):
            await sleep.submit(30.0)
            await asyncio.sleep(0.1)
            raise LookupError
    except LookupError:
        pass
""",
    "cancelled in the block": """
async def work():
    async with mesh.worker(WorkerSettings(drain_timeout=0.1)):
        await sleep.submit(30.0)
        await asyncio.sleep(30)

async def main():
    task = asyncio.create_task(work())
    await asyncio.sleep(0.3)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        pass
""",
    "entered by several at once": """
async def use():
    async with mesh, mesh.worker():
        assert await (await add.submit(1, 2)).result(timeout=5) == 3

async def main():
    await asyncio.gather(use(), use(), use())
    await use()
""",
    "map that is broken off": """
async def main():
    async with mesh, mesh.worker():
        async for done in sleep.map([0.0, 0.0, 0.3, 0.3]):
            break
        await asyncio.sleep(0.05)
""",
    "abandoned": """
async def main():
    async with mesh, mesh.worker() as worker:
        await sleep.submit_many([30.0] * 5)
        await asyncio.sleep(0.2)
        worker.abandon()
        await asyncio.sleep(0.05)
""",
    "the server is gone": """
async def main():
    async with mesh, mesh.worker(WorkerSettings(drain_timeout=0.1)):
        await sleep.submit_many([0.3] * 5)
        await asyncio.sleep(0.1)
        print("kill", flush=True)
        sys.stdin.readline()
""",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_ends_in_silence(name: str) -> None:
    program = HEAD + PROGRAMS[name] + "\nasyncio.run(main())\n"
    with RedisServer() as server:
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-W", "error::ResourceWarning", "-c", program],
            env={**os.environ, "TASKMESH_URL": server.url, "TASKMESH_LIVENESS_TTL": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        watchdog = threading.Timer(40, process.kill)
        watchdog.start()
        assert process.stdout is not None
        if process.stdout.readline() == "kill\n":
            server.kill()
        _, errors = process.communicate("go\n")
        watchdog.cancel()
    assert errors == ""
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGINT])
def test_a_keyboard_interrupt_drains_and_ends_with_its_own_traceback_alone(number: signal.Signals) -> None:
    program = HEAD + (
        "async def main():\n"
        "    async with mesh.worker(WorkerSettings(drain_timeout=0.1)):\n"
        "        await sleep.submit(30.0)\n"
        "        await asyncio.sleep(0.1)\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(30)\n"
        "asyncio.run(main())\n"
    )
    with RedisServer() as server:
        process = subprocess.Popen(
            [sys.executable, "-X", "dev", "-c", program],
            env={**os.environ, "TASKMESH_URL": server.url, "TASKMESH_LIVENESS_TTL": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        _, errors = process.communicate(timeout=30)
        with server.client() as client:
            # It has left, and its work is handed back.
            assert client.zrange("taskmesh:{exit:default:0}:workers", 0, -1) == [b"returned"]
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert "never retrieved" not in errors
    assert "destroyed" not in errors
    assert "unclosed" not in errors
