"""The examples as a newcomer runs them: copied to a folder of their own, in their smallest form, as processes."""

from __future__ import annotations

import re
import shutil
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from examples.curve import Curve, Kind
from taskmesh.testing import wait_until
from tests.integration.cli_support import ROOT, Program, environment

pytest.importorskip("sklearn")

pytestmark = pytest.mark.timeout(500)

SMALLEST = {"digits": ["digits"], "tiny_gpt": ["tiny_gpt", "--size", "small"]}
RUNS = {"digits": "digits", "tiny_gpt": "small"}
STEPS = 60
FAR = 100_000
WITHOUT_MATPLOTLIB = """
import runpy, sys
sys.modules["matplotlib"] = None
runpy.run_module("examples.digits", run_name="__main__")
"""
both = pytest.mark.parametrize("name", SMALLEST)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a copy of the examples, which come before the repository's own on the path."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def command(name: str, *options: str) -> list[str]:
    example, *size = SMALLEST[name]
    return [sys.executable, "-m", f"examples.{example}", *size, *options]


def variables(url: str | None) -> dict[str, str]:
    """Those of a shell; without a URL the examples start a server of their own."""
    made = environment(url or "")
    for variable in ("TASKMESH_BULK_URL", "TASKMESH_DATA"):
        made.pop(variable, None)
    return made


def run(folder: Path, arguments: list[str], url: str | None = None) -> str:
    """Run a program to its end; what it printed."""
    done = subprocess.run(
        arguments, cwd=folder, env=variables(url), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@contextmanager
def under_way(folder: Path, arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        arguments,
        cwd=folder,
        env=variables(None),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as started:
        try:
            yield started
        finally:
            started.kill()


def curve_of(folder: Path, name: str) -> Curve:
    return Curve(folder / "runs" / f"{RUNS[name]}.jsonl")


def assert_is_a_picture(path: Path) -> None:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    assert 600 <= width <= 2000 and 400 <= height <= 1500
    assert 10_000 < len(data) < 1_000_000


def assert_learnt(curve: Curve, steps: int) -> None:
    losses = [point.value for point in curve.of("loss")]
    assert len(losses) == steps
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    validation = [point.value for point in curve.of("validation")]
    assert len(validation) >= 2
    assert validation[-1] < 0.8 * validation[0]


@both
def test_alone(name: str, folder: Path) -> None:
    said = run(folder, command(name, "--steps", str(STEPS)))
    for part in (
        "loss",
        "validation",
        "steps/s",
        "fewer bytes",
        "1 worker alive",
        "kept",
        "loss curve: runs",
    ):
        assert part in said
    assert_learnt(curve_of(folder, name), STEPS)
    assert_is_a_picture(folder / "runs" / f"{RUNS[name]}.png")
    if name == "tiny_gpt":
        assert_is_text(said.partition("what it writes after 'def ':")[2].strip())


def assert_is_text(sample: str) -> None:
    assert sample.startswith("def ")
    assert len(sample) > 200
    assert len(re.findall(r"[A-Za-z_ ]", sample)) > len(sample) / 2


def test_a_run_that_has_all_its_steps(folder: Path) -> None:
    run(folder, command("digits", "--steps", "30"))
    said = run(folder, command("digits", "--steps", "30"))
    assert "the run has its 30 steps already: --steps 60 takes it on" in said


@both
async def test_with_a_worker_of_its_own(name: str, folder: Path, redis_url: str) -> None:
    worker = Program(["worker", f"examples.{name}:mesh", "-c", "2"], folder, redis_url)
    try:
        said = run(folder, command(name, "--steps", str(STEPS), "--no-worker"), redis_url)
        assert "1 worker alive" in said
        worker.process.terminate()
        assert await worker.ends() == 0
    finally:
        worker.close()
    assert_learnt(curve_of(folder, name), STEPS)


@both
async def test_a_killed_master_goes_on(name: str, folder: Path) -> None:
    with under_way(folder, command(name, "--steps", str(FAR))) as master:
        await wait_until(lambda: curve_of(folder, name).step >= 25, 120)
    reached = curve_of(folder, name).step
    assert master.returncode == -signal.SIGKILL
    steps = reached + 10
    said = run(folder, command(name, "--steps", str(steps)))
    begun = re.search(r"goes on from step (\d+)", said)
    assert begun is not None
    assert 20 <= int(begun[1]) <= reached
    curve = curve_of(folder, name)
    (mark,) = curve.of("killed")
    assert (mark.step, mark.value) == (reached, int(begun[1]))
    assert curve.step == steps
    assert_is_a_picture(folder / "runs" / f"{RUNS[name]}.png")


async def test_ctrl_c_says_where_it_goes_on(folder: Path) -> None:
    with under_way(folder, command("digits", "--steps", str(FAR))) as master:
        await wait_until(lambda: curve_of(folder, "digits").step >= 25, 120)
        master.send_signal(signal.SIGINT)
        said, _ = master.communicate(timeout=60)
    assert master.returncode == 130
    assert "Traceback" not in said
    stopped = re.search(r"stopped at step (\d+): started again, it goes on from step (\d+)", said)
    assert stopped is not None
    assert_is_a_picture(folder / "runs" / "digits.png")
    again = run(folder, command("digits", "--steps", str(int(stopped[1]) + 1)))
    assert f"goes on from step {stopped[2]}" in again
    assert curve_of(folder, "digits").of("stopped")


def test_without_matplotlib_it_says_so(folder: Path) -> None:
    said = run(folder, [sys.executable, "-c", WITHOUT_MATPLOTLIB, "--steps", "5"])
    assert "no picture of the loss curve: matplotlib is missing (pip install 'taskmesh[examples]')" in said
    assert not (folder / "runs" / "digits.png").exists()


def test_a_picture_with_everything_that_can_go_wrong(tmp_path: Path) -> None:
    from examples.picture import draw

    curve = Curve(tmp_path / "runs" / "run.jsonl")
    curve.take_up(is_new=True)
    story: list[tuple[int, int, Kind]] = [
        (0, 70, "killed"),
        (50, 110, "rolled back"),
        (90, 130, "stopped"),
        (110, 160, "end"),
    ]
    for begin, end, mark in story:
        for step in range(begin + 1, end + 1):
            curve.add("loss", step, 5.0 / step + 1.0)
        curve.add(mark, end, max(0, end - 20))
    curve.add("worker gone", 140)
    draw(curve, tmp_path / "run.png", title="everything", loss_unit="nats")
    assert_is_a_picture(tmp_path / "run.png")
