"""Clocks that are minutes apart, and signals while the server is gone: worker processes tell."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from taskmesh import (
    Mesh,
    Retry,
)
from taskmesh.testing import RedisServer, wait_until
from tests.conftest import MakeMesh, settings_for_tests
from tests.integration.cli_support import Program
from tests.integration.fault_fleet import held_by

TTL = 0.5
PREFIX = "taskmesh:{test:default:0}:"
LANE = PREFIX + "tasks:normal"


SKEWED = """
import asyncio, os, time

ahead = float(os.environ["AHEAD"])
now, now_ns = time.time, time.time_ns
time.time, time.time_ns = lambda: now() + ahead, lambda: now_ns() + int(ahead * 1e9)

from taskmesh import Context, Mesh, Retry

mesh = Mesh("test")

@mesh.task
async def who(ctx: Context, seconds: float) -> list[int]:
    await asyncio.sleep(seconds)
    return [os.getpid(), ctx.deliveries]

@mesh.task(retry=Retry(attempts=2, delay=0.5, jitter=0))
async def flaky(ctx: Context) -> int:
    if ctx.attempt == 1:
        raise OSError
    return ctx.attempt

@mesh.task
async def chain() -> int:
    handle = await who.options(expires=2).submit_in(0.2, 0.0)
    return (await handle.result(timeout=5))[1]

async def main():
    async with mesh.worker():
        print("ready", flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.fixture
def skewed(redis_url: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two workers whose own clocks are ten minutes apart, and five from everybody else's."""
    processes = []
    for ahead in ("-300", "300"):
        environment = {
            **os.environ,
            "TASKMESH_URL": redis_url,
            "TASKMESH_LIVENESS_TTL": str(TTL * 2),
            "AHEAD": ahead,
        }
        processes.append(
            subprocess.Popen([sys.executable, "-c", SKEWED], env=environment, stdout=subprocess.PIPE)
        )
    for process in processes:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


async def test_workers_whose_clocks_differ_by_minutes_agree_on_every_time(
    make_mesh: MakeMesh, skewed: list[subprocess.Popen[bytes]], plain: redis.Redis
) -> None:
    """Expiry, delays, retries and leases."""
    mesh = make_mesh(liveness_ttl=TTL * 2)

    @mesh.task
    async def who(seconds: float) -> list[int]:
        return []

    @mesh.task(retry=Retry(attempts=2))
    async def flaky() -> int:
        return 0

    @mesh.task
    async def chain() -> int:
        return 0

    async with mesh:
        soon = await who.options(expires=10).submit_many([0.02] * 40)
        ran = [await handle.result(timeout=10) for handle in soon]
        assert {pid for pid, _ in ran} == {process.pid for process in skewed}
        began = time.monotonic()
        delayed = [await who.submit_in(0.5, 0.0), await flaky.submit()]
        for handle in delayed:
            await handle.result(timeout=10)
            assert 0.5 <= time.monotonic() - began < 3
        assert [await (await chain.submit()).result(timeout=10) for _ in range(4)] == [1] * 4
        long = await who.submit_many([TTL * 6] * 4)
        assert [deliveries for _, deliveries in [await each.result(timeout=10) for each in long]] == [1] * 4
        dies = await who.submit_many([1.0] * 40)
        await wait_until(lambda: len(held_by(plain, LANE)) == 2)
        skewed[0].kill()
        ends = [await handle.result(timeout=10) for handle in dies]
        assert {pid for pid, _ in ends} == {skewed[1].pid}
        assert {deliveries for _, deliveries in ends} == {1, 2}


SHOP = """
import pathlib, time
from taskmesh import Mesh

mesh = Mesh("shop")

@mesh.task
def hold(seconds: float) -> None:
    pathlib.Path("started").touch()
    time.sleep(seconds)
"""


@pytest.mark.parametrize("again", [False, True], ids=["one signal", "two signals"])
async def test_a_worker_ends_in_time_with_the_server_gone_and_a_thread_that_runs_on(
    tmp_path: Path, again: bool
) -> None:
    (tmp_path / "shop.py").write_text(SHOP)
    grace = "30" if again else "1"
    with RedisServer() as server:
        worker = Program(["worker", "shop:mesh", "--drain-timeout", grace], tmp_path, server.url)
        try:
            await worker.says("serves")
            mesh = Mesh("shop", settings=settings_for_tests(server.url))

            @mesh.task
            def hold(seconds: float) -> None: ...

            async with mesh:
                await hold.submit(60)
            await wait_until((tmp_path / "started").exists)
            server.kill()
            worker.process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            await worker.says("draining")
            if again:
                worker.process.send_signal(signal.SIGTERM)
            await worker.ends(20)
            assert time.monotonic() - began < (2 if again else 1 + 5)
            assert "Traceback" not in worker.text
        finally:
            worker.close()
