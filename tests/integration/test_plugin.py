"""The pytest plugin, as users have it: a folder with an application and its tests, run by a pytest of its own."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from taskmesh import ConfigurationError, Mesh, Retry, TaskExpired, WorkerSettings
from taskmesh.settings import Durability
from taskmesh.testing import MovableClock
from taskmesh.testing.meshes import LIVENESS_TTL, Connect, FailAt, Idle, MakeMesh, Run

APP = """
from taskmesh import Mesh

mesh = Mesh("shop")

@mesh.task
async def price(item: str) -> int:
    return len(item)

@mesh.task
async def fail() -> None:
    raise LookupError("nothing there")
"""
RunTests = Callable[..., str]


@pytest.fixture
def run_tests(tmp_path: Path) -> RunTests:
    """Runs a file of tests beside the application; returns what pytest printed."""

    def run(tests: str, *arguments: str, conftest: str = "") -> str:
        (tmp_path / "shop.py").write_text(APP)
        (tmp_path / "conftest.py").write_text(conftest)
        (tmp_path / "test_shop.py").write_text(tests)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
        return done.stdout

    return run


def outcomes(printed: str) -> dict[str, int]:
    last = printed.strip().splitlines()[-1]
    return {what: int(count) for count, what in re.findall(r"(\d+) (passed|failed|errors?|warnings?)", last)}


SYNC = """
import asyncio
from shop import mesh, price

def test_price(taskmesh_run):
    async def scenario():
        async with taskmesh_run(mesh):
            return await (await price.submit("tea")).result(timeout=5)
    assert asyncio.run(scenario()) == 3
"""
ASYNC = """
import pytest
from shop import mesh, price

@pytest.mark.asyncio
async def test_price(taskmesh_run):
    async with taskmesh_run(mesh):
        assert await (await price.submit("tea")).result(timeout=5) == 3

@pytest.mark.asyncio
async def test_the_server_is_empty_again(taskmesh_connect, taskmesh_server):
    async with taskmesh_connect(mesh):
        assert taskmesh_server.command("DBSIZE") == 0
"""
LEAKS = """
import asyncio, pytest
from shop import mesh, fail, price
from taskmesh import TaskFailed

def test_clean(taskmesh_run, taskmesh_leaks):
    async def scenario():
        async with taskmesh_run(mesh):
            await (await price.submit("tea")).result(timeout=5)
    asyncio.run(scenario())

def test_leaking(taskmesh_run, taskmesh_leaks):
    async def scenario():
        async with taskmesh_run(mesh):
            with pytest.raises(TaskFailed):
                await (await fail.submit()).result(timeout=5)
    asyncio.run(scenario())
"""


def test_it_works_without_any_asyncio_plugin(run_tests: RunTests) -> None:
    printed = run_tests(SYNC, "-p", "no:asyncio")
    assert outcomes(printed) == {"passed": 1}, printed


@pytest.mark.parametrize("mode", ["strict", "auto"])
def test_it_works_in_either_mode_of_pytest_asyncio(run_tests: RunTests, mode: str) -> None:
    printed = run_tests(ASYNC, "-o", f"asyncio_mode={mode}")
    assert outcomes(printed) == {"passed": 2}, printed


def test_keys_that_are_left_behind_fail_the_test(run_tests: RunTests) -> None:
    printed = run_tests(LEAKS)
    assert "keys were left behind" in printed
    assert "shop:default:0}:dead" in printed
    assert outcomes(printed) in ({"passed": 2, "error": 1}, {"passed": 2, "errors": 1}), printed


def test_its_fixtures_are_listed_with_what_they_do(run_tests: RunTests) -> None:
    printed = run_tests("", "--fixtures")
    for name in ("server", "url", "settings", "clock", "connect", "run", "idle", "mesh", "fail_at", "leaks"):
        described = re.search(
            rf"^taskmesh_{name}(?: \[session scope\])? -- .*\n    (\S.*)", printed, re.MULTILINE
        )
        assert described, name
        assert "no docstring" not in described[1]


# the application's own Mesh


def application() -> Mesh:
    """What a module of the user's has: made at import, with settings of its own."""
    return Mesh("shop", "redis://127.0.0.1:1/0")


async def test_the_applications_mesh_is_as_it_was_afterwards(
    taskmesh_run: Run, taskmesh_connect: Connect, taskmesh_url: str, taskmesh_clock: MovableClock
) -> None:
    mesh = application()
    mesh.settings = type(mesh.settings)(
        url=mesh.settings.url, result_ttl=7, durability=Durability(replicas=1)
    )

    @mesh.task
    async def double(n: int) -> int:
        return 2 * n

    own = mesh.settings, mesh.clock
    async with taskmesh_connect(mesh), taskmesh_run(mesh), taskmesh_run(mesh):
        assert (mesh.settings.url, mesh.settings.result_ttl) == (taskmesh_url, 7)
        assert mesh.clock is taskmesh_clock
        async with mesh:  # as the application itself does
            assert await (await double.submit(4)).result(timeout=5) == 8
    assert (mesh.settings, mesh.clock) == own


async def test_a_mesh_that_is_connected_elsewhere_is_refused(
    taskmesh_mesh: MakeMesh, taskmesh_connect: Connect
) -> None:
    async with taskmesh_mesh(result_ttl=3, liveness_ttl=5) as mesh:
        with pytest.raises(ConfigurationError, match="is connected already"):
            async with taskmesh_connect(mesh):
                pass
        assert mesh.settings.liveness_ttl == 5


# time


async def test_what_is_delayed_is_due_at_once_when_the_clock_moves(
    taskmesh_run: Run, taskmesh_clock: MovableClock, taskmesh_idle: Idle
) -> None:
    mesh = application()
    tries: list[float] = []

    @mesh.task(retry=Retry(attempts=3, delay=600, jitter=0))
    async def work(fails: bool) -> str:
        tries.append(time.monotonic())
        if fails and len(tries) < 3:
            raise OSError("not yet")
        return "done"

    async with taskmesh_run(mesh), taskmesh_run(mesh):
        handle = await work.submit_in(86_400, True)
        await taskmesh_idle(mesh)
        assert tries == []
        began = time.monotonic()
        for seconds in (86_400, 600, 1200):
            taskmesh_clock.advance(seconds)
            await taskmesh_idle(mesh)
        assert await handle.result(timeout=5) == "done"
        assert len(tries) == 3
        assert time.monotonic() - began < 1, "the workers heard of each jump at once"


async def test_expiry_is_reckoned_by_the_clock_before_and_after_it_moved(
    taskmesh_connect: Connect, taskmesh_run: Run, taskmesh_clock: MovableClock
) -> None:
    mesh = application()

    @mesh.task
    async def work() -> str:
        return "done"

    async with taskmesh_connect(mesh):
        taskmesh_clock.advance(1000)
        late = await work.options(expires=30).submit()
        taskmesh_clock.advance(31)
        fresh = await work.options(expires=30).submit()
        async with taskmesh_run(mesh):
            assert await fresh.result(timeout=5) == "done"
            with pytest.raises(TaskExpired):
                await late.result(timeout=5)


async def test_a_jump_of_the_clock_robs_no_worker_that_lives(
    taskmesh_run: Run, taskmesh_clock: MovableClock
) -> None:
    mesh = application()
    runs = 0
    release = asyncio.Event()

    @mesh.task
    async def work() -> None:
        nonlocal runs
        runs += 1
        await release.wait()

    one = WorkerSettings(concurrency=1)
    async with taskmesh_run(mesh, one), taskmesh_run(mesh, one), taskmesh_run(mesh, one):
        handle = await work.submit()
        for _ in range(2):
            await asyncio.sleep(1.5 * LIVENESS_TTL)  # the others' looks count again
            taskmesh_clock.advance(60)
        await asyncio.sleep(LIVENESS_TTL / 2)
        release.set()
        await handle.result(timeout=5)
    assert runs == 1


async def test_a_worker_that_fails_at_a_point_leaves_its_work_to_the_other(
    taskmesh_run: Run, taskmesh_fail_at: FailAt, taskmesh_clock: MovableClock
) -> None:
    mesh = application()
    runs = 0

    @mesh.task
    async def work() -> int:
        nonlocal runs
        runs += 1
        return runs

    async with taskmesh_run(mesh) as doomed:
        fault = taskmesh_fail_at(doomed, "finished")
        handle = await work.submit()
        async with taskmesh_run(mesh):
            assert await handle.result(timeout=10) == 2
    assert fault.passes == 1
