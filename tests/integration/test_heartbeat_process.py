"""The lease in a child process: C calls that hold the interpreter lock, workers that are stopped, killed, wedged."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from taskmesh import Mesh, WorkerSettings
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh

TTL = 1.0
PREFIX = "taskmesh:{test:default:0}:"
PROGRAM = """
import asyncio, sys
from taskmesh import Context, Mesh, WorkerSettings

mesh = Mesh("test")

@mesh.task
async def hold(ctx: Context, exponent: int) -> int:
    3 ** exponent  # one C call, which lets no other thread run
    return ctx.deliveries

@mesh.task(timeout=0.8)
async def wedge(exponent: int) -> str:
    await asyncio.sleep(0.4)  # long enough for the lease's process to hear of it
    3 ** exponent
    return "here"

@mesh.task
async def nap(ctx: Context, seconds: float) -> int:
    await asyncio.sleep(seconds)
    return ctx.deliveries

async def main():
    async with mesh.worker(WorkerSettings(loop_grace=0.5, heartbeat="process")):
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def worker(redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "TASKMESH_URL": redis_url, "TASKMESH_LIVENESS_TTL": str(TTL)}
    process = subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    yield process
    process.kill()
    process.send_signal(signal.SIGCONT)
    process.wait()
    process.stdout.close()


def children(process: subprocess.Popen[bytes]) -> list[int]:
    threads = Path(f"/proc/{process.pid}/task").glob("*/children")
    return [int(word) for thread in threads for word in thread.read_text().split()]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def client_of(make_mesh: MakeMesh) -> Mesh:
    """The same tasks, which here say where they run."""
    mesh = make_mesh(liveness_ttl=TTL)

    @mesh.task
    async def hold(exponent: int) -> int:
        return -1

    @mesh.task
    async def wedge(exponent: int) -> str:
        return "elsewhere"

    @mesh.task
    async def nap(seconds: float) -> int:
        return -1

    return mesh


async def started(plain: redis.Redis) -> None:
    await wait_until(lambda: plain.xpending(PREFIX + "tasks:normal", "workers")["pending"] == 1)


def exponent_for(seconds: float) -> int:
    """A power of three that takes about so long here. Its time grows a little faster than the exponent."""
    exponent, took = 1_000_000, 0.0
    while True:
        begun = time.monotonic()
        _ = 3**exponent
        took = time.monotonic() - begun
        if took > 0.15:
            return int(exponent * (seconds / took) ** 0.63)
        exponent *= 2


async def test_a_c_call_that_holds_the_interpreter_lock_keeps_the_lease(
    make_mesh: MakeMesh, worker: subprocess.Popen[bytes], plain: redis.Redis
) -> None:
    mesh = client_of(make_mesh)
    async with mesh:
        begun = time.monotonic()
        handle = await mesh.get_task("hold").submit(exponent_for(3 * TTL))
        await started(plain)
        async with mesh.worker():  # idle, and watching
            assert await handle.result(timeout=60) == 1
        assert time.monotonic() - begun > 2 * TTL


async def test_a_stopped_worker_loses_the_lease(
    make_mesh: MakeMesh, worker: subprocess.Popen[bytes], plain: redis.Redis
) -> None:
    mesh = client_of(make_mesh)
    async with mesh, mesh.worker(WorkerSettings(concurrency=1)):
        await wait_until(lambda: plain.zcard(PREFIX + "workers") == 2)
        handles = [await mesh.get_task("nap").submit(30.0) for _ in range(20)]
        await wait_until(lambda: plain.xpending(PREFIX + "tasks:normal", "workers")["pending"] > 0)
        worker.send_signal(signal.SIGSTOP)
        assert [await handle.result(timeout=20) for handle in handles] == [-1] * 20


async def test_a_killed_workers_child_ends_and_its_work_restarts_in_time(
    make_mesh: MakeMesh, worker: subprocess.Popen[bytes], plain: redis.Redis
) -> None:
    mesh = client_of(make_mesh)
    async with mesh:
        handle = await mesh.get_task("nap").submit(30.0)
        await started(plain)
        async with mesh.worker():
            await asyncio.sleep(2 * TTL)  # as long as an observer takes to be one
            [lease] = children(worker)
            worker.kill()
            killed = time.monotonic()
            assert await handle.result(timeout=20) == -1
            took = time.monotonic() - killed
            await wait_until(lambda: not is_running(lease))
    assert 0.5 * TTL < took < TTL + 1.0  # the figure itself is held by benchmarks.depth, on a quiet machine


async def test_the_child_is_replaced_when_it_dies(
    make_mesh: MakeMesh, worker: subprocess.Popen[bytes], plain: redis.Redis
) -> None:
    mesh = client_of(make_mesh)
    async with mesh:
        handle = await mesh.get_task("nap").submit(3 * TTL)
        await started(plain)
        async with mesh.worker():
            [lease] = children(worker)
            os.kill(lease, signal.SIGKILL)
            await wait_until(lambda: any(child != lease for child in children(worker)))
            assert await handle.result(timeout=20) == 1


async def test_a_worker_that_a_c_call_blocks_past_timeout_and_grace_is_killed(
    make_mesh: MakeMesh, worker: subprocess.Popen[bytes]
) -> None:
    mesh = client_of(make_mesh)
    async with mesh:
        handle = await mesh.get_task("wedge").submit(1_000_000_000)
        assert await asyncio.to_thread(worker.wait, 20) == -signal.SIGKILL
        async with mesh.worker():
            assert await handle.result(timeout=20) == "elsewhere"
