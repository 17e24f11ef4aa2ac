"""Workers with handlers in processes, as programs: how the processes find the handlers, and that they end with them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from taskmesh import Mesh, TaskFailed
from taskmesh.testing import wait_until
from tests.conftest import settings_for_tests
from tests.fundamentals import process_tasks
from tests.fundamentals.process_tasks import marked
from tests.fundamentals.test_processes import is_alive

ROOT = Path(__file__).parents[2]
Start = Callable[..., subprocess.Popen[str]]
SCRIPT = """
import asyncio, os, signal
from taskmesh import Mesh, WorkerSettings

mesh = Mesh("script")


class Declined(Exception):
    pass


@mesh.task(process=True, raises=(Declined,))
def crunch(n: int) -> int:
    if n < 0:
        raise Declined(n)
    return os.getpid()


async def main() -> None:
    async with mesh, mesh.worker(WorkerSettings(processes=1)):
        assert await (await crunch.submit(1)).result(timeout=20) != os.getpid()
        try:
            await (await crunch.submit(-1)).result(timeout=20)
        except Declined as error:
            print("declined", error.args)
"""
GUARDED = """

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Starts Python with these arguments in an empty folder."""
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TASKMESH_URL": redis_url, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


async def output(process: subprocess.Popen[str]) -> str:
    return (await asyncio.to_thread(process.communicate, timeout=60))[0]


async def test_in_a_plain_script(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + GUARDED)
    assert "declined (-1,)" in await output(start("script.py"))


async def test_in_a_module_that_is_run(start: Start, tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").touch()
    (tmp_path / "pkg" / "mod.py").write_text("from . import __name__ as package\n" + SCRIPT + GUARDED)
    assert "declined (-1,)" in await output(start("-m", "pkg.mod"))


async def test_a_script_that_does_not_guard_its_work_is_told_so(start: Start, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + "\n\nasyncio.run(main())\n")
    text = await output(start("script.py"))
    assert "a process cannot load task 'crunch'" in text
    assert 'under `if __name__ == "__main__":`' in text


async def test_in_an_interactive_session_it_is_refused(start: Start) -> None:
    text = await output(start("-c", SCRIPT + "\nasyncio.run(main())"))
    assert "ConfigurationError: task 'crunch' has process=True" in text
    assert "it was defined in an interactive session; define it in a file" in text


async def test_the_command_line_finds_handlers_in_its_folder(
    start: Start, tmp_path: Path, redis_url: str
) -> None:
    (tmp_path / "app.py").write_text(SCRIPT)
    worker = start("-m", "taskmesh", "worker", "app:mesh", "--handler-procs", "1")
    mesh = Mesh("script", settings=settings_for_tests(redis_url))

    @mesh.task
    def crunch(n: int) -> int:
        return n

    async with mesh:
        assert await (await crunch.submit(1)).result(timeout=20) != worker.pid
        with pytest.raises(TaskFailed, match=r"app\.Declined: -1"):
            await (await crunch.submit(-1)).result(timeout=20)
    worker.send_signal(signal.SIGINT)
    text = await output(worker)
    assert worker.returncode == 0
    assert "Traceback" not in text


async def test_the_command_line_refuses_a_handler_that_no_process_can_import(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "app.py").write_text(
        "from taskmesh import Mesh\n\nmesh = Mesh('script')\n\n\ndef make():\n"
        "    @mesh.task(process=True)\n    def inner() -> None: ...\n\n\nmake()\n"
    )
    worker = start("-m", "taskmesh", "worker", "app:mesh")
    text = await output(worker)
    assert worker.returncode == 1
    assert text.splitlines()[-1] == (
        "taskmesh: task 'inner' has process=True, but no other process can import its handler: "
        "make.<locals>.inner is defined inside a function; define it at the top of a module"
    )


async def test_no_process_outlives_a_worker_that_is_killed(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    marks = tmp_path / "marks"
    process_tasks.mesh.settings = settings_for_tests(redis_url)
    app = "tests.fundamentals.process_tasks:mesh"
    worker = start("-m", "taskmesh", "worker", app, "--handler-procs", "3")
    async with process_tasks.mesh:
        sleeping = await process_tasks.pid.submit_many([0.5] * 3)
        children = {await handle.result(timeout=20) for handle in sleeping}
        busy = await process_tasks.endless.submit(str(marks))
        again = await process_tasks.endless.submit(str(marks))
        await wait_until(lambda: len(marked(marks)) == 2)
        pids = {*children, *marked(marks)[0], *marked(marks)[1]}
        assert len(pids) == 5
        assert all(map(is_alive, pids))
        worker.kill()
        await wait_until(lambda: not any(map(is_alive, pids)), timeout=5)
        await busy.cancel()
        await again.cancel()


async def test_signals_to_all_processes_do_not_disturb_a_drain(
    start: Start, redis_url: str, tmp_path: Path
) -> None:
    process_tasks.mesh.settings = settings_for_tests(redis_url)
    worker = start("-m", "taskmesh", "worker", "tests.fundamentals.process_tasks:mesh")
    async with process_tasks.mesh:
        child = await (await process_tasks.pid.submit()).result(timeout=20)
        handle = await process_tasks.pid.submit(1.5)
        await asyncio.sleep(0.5)
        for pid in (child, worker.pid):
            os.kill(pid, signal.SIGTERM)
        assert await handle.result(timeout=10) == child
        text = await output(worker)
    assert worker.returncode == 0
    assert "its process ended" not in text
    assert not is_alive(child)
