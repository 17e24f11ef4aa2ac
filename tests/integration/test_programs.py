"""The programs of workers/ and dashboards/, as processes of their own."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from taskmesh import Mesh
from taskmesh.monitoring import snapshot
from taskmesh.testing import wait_until
from tests.integration.cli_support import APP, ROOT, environment

TRAINER = """
import asyncio, os
from pathlib import Path
from shop import mesh

class Trainer:
    mesh = mesh

    async def run(self, steps):
        Path("steps").write_text(f"{steps} {mesh.client.new_id() != ''}")
        if steps == 7:
            await asyncio.sleep(60)

trainer = Trainer()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.joinpath("shop.py").write_text(APP)
    tmp_path.joinpath("run.py").write_text(TRAINER)
    return tmp_path


@contextmanager
def program(name: str, folder: Path, url: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(
        [sys.executable, "-m", f"workers.{name}"],
        cwd=folder,
        env={**environment(url), **variables},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    with started:
        try:
            yield started
        finally:
            started.kill()


@pytest.mark.parametrize("name", ["gradient", "scoring"])
async def test_the_workers_serve_and_drain(name: str, folder: Path, redis_url: str) -> None:
    mesh = Mesh("shop", redis_url)

    @mesh.task
    async def add(a: int, b: int) -> int:
        raise AssertionError("it runs in the program")

    with program(name, folder, redis_url, TASKMESH_APP="run:trainer", TASKMESH_QUEUES="default") as worker:
        async with mesh:
            handle = await add.submit(1, 2)
            assert await handle.result(timeout=20) == 3
            (listed,) = (await snapshot(mesh)).workers
            assert listed.queues == ("default",)
            worker.send_signal(signal.SIGTERM)
            await wait_until(lambda: worker.poll() is not None)
            assert worker.returncode == 0
            assert (await snapshot(mesh)).workers == ()


async def test_the_master_runs_to_its_end(folder: Path, redis_url: str) -> None:
    with program("master", folder, redis_url, TASKMESH_APP="run:trainer", TASKMESH_STEPS="3") as master:
        await wait_until(lambda: master.poll() is not None)
        assert master.returncode == 0
    assert (folder / "steps").read_text() == "3 True"


async def test_the_master_stops_when_told(folder: Path, redis_url: str) -> None:
    with program("master", folder, redis_url, TASKMESH_APP="run:trainer", TASKMESH_STEPS="7") as master:
        await wait_until(lambda: (folder / "steps").exists())
        master.send_signal(signal.SIGTERM)
        await wait_until(lambda: master.poll() is not None)
        assert master.returncode == 0


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({}, "ConfigurationError: TASKMESH_APP is '': write module:attribute, as in examples.digits:trainer"),
        ({"TASKMESH_APP": "nowhere:trainer"}, "TASKMESH_APP is 'nowhere:trainer': No module named 'nowhere'"),
        ({"TASKMESH_APP": "run:nothing"}, "has no attribute 'nothing'"),
        (
            {"TASKMESH_APP": "run:trainer", "TASKMESH_STEPS": "many"},
            "TASKMESH_STEPS is 'many': write a whole number",
        ),
        (
            {"TASKMESH_APP": "run:trainer", "TASKMESH_URL": "redis://127.0.0.1:1"},
            "no answer from redis://127.0.0.1:1",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    folder: Path, redis_url: str, variables: dict[str, str], said: str
) -> None:
    with program("master", folder, redis_url, **variables) as master:
        _, text = master.communicate(timeout=20)
    assert master.returncode == 1
    assert said in text and text.count("\n") == 1


def test_the_terminal_view(folder: Path, redis_url: str) -> None:
    pytest.importorskip("rich")
    done = subprocess.run(
        [sys.executable, ROOT / "dashboards" / "terminal.py", "--once"],
        cwd=folder,
        env={**environment(redis_url), "TASKMESH_APP": "shop:mesh"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "shop" in done.stdout and "mail" in done.stdout
