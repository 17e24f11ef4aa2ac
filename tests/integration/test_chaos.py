"""The chaos run in a short, seeded form, on every topology. ``make chaos`` runs the long one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.chaos.fleet import processes_of
from benchmarks.chaos.run import Options, run
from benchmarks.chaos.schedule import TOPOLOGIES, TopologyName
from taskmesh.testing import wait_until

ROOT = Path(__file__).parents[2]
SEED = 3
SECONDS = 4.0


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Everything temporary goes here. Its path is short: that of a unix socket has a limit."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as made:
        monkeypatch.setenv("TMPDIR", made)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(made)


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_nothing_is_lost_or_settled_twice_and_nothing_left_behind(
    topology: TopologyName, folder: Path
) -> None:
    options = Options(SEED, SECONDS, topology, drain_limit=30.0, workers=3, producers=1, masters=1)
    report = asyncio.run(run(options))
    assert report.stories == []
    counts = report.account.counts
    assert counts["accepted"] > 20
    assert counts["accepted"] == sum(counts[end] for end in ("succeeded", "failed", "cancelled", "expired"))
    assert [kind for kind, struck in report.faults.items() if not struck] == []
    assert what_is_left(folder) == []


def test_an_interrupted_run_leaves_nothing_behind(folder: Path) -> None:
    words = ["-m", "benchmarks.chaos", "--seconds", "60", "--seed", str(SEED), "--topology", "single"]
    driver = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        # The driver, a server, and the first of the workers and producers.
        asyncio.run(wait_until(lambda: len(list(processes_of(folder))) > 6, timeout=20.0))
        driver.send_signal(signal.SIGINT)
        assert driver.wait(20.0) != 0
    finally:
        driver.kill()
        driver.wait()
    assert what_is_left(folder) == []


def what_is_left(folder: Path) -> list[object]:
    """Processes, and files; the folder for sockets stays, for the next embedded server."""
    files = [path for path in folder.rglob("*") if path != folder / f"taskmesh-{os.getuid()}"]
    return [*processes_of(folder), *files]
