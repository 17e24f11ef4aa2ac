"""The main job, end to end, as ``make demo`` runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.timeout(180)
def test_the_demo_holds_what_it_promises() -> None:
    command = [sys.executable, "-m", "taskmesh.cli.main", "demo", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["accuracy"] >= 0.97
    assert report["steps"] == 200
    assert 0 < report["worker_killed_recovery_s"] < 5
    assert report["rollbacks"] >= 1
    assert report["shards_refused"] >= 1
    assert report["uplink_bytes_saved_ratio"] >= 0.745
    assert report["rows_scored"] > 1000
    assert report["rows_per_s"] > 500
    assert report["score_p99_s"] > 0
    assert (report["tasks_lost"], report["tasks_settled_twice"], report["keys_leaked"]) == (0, 0, 0)
