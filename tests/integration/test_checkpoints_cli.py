"""``taskmesh checkpoints`` on the versions of a real run."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from taskmesh import CheckpointError, ConfigurationError, TaskmeshError, TrainingError
from taskmesh.checkpoints.files import MANIFEST, MODEL, STATE
from taskmesh.cli.main import app
from taskmesh.keys import RunKeys
from taskmesh.training import Trainer
from tests.integration.training_support import ONE

APP = """
from taskmesh import Mesh
from taskmesh.training import Every
from tests.integration.training_support import make_trainer

mesh = Mesh("test")
trainer = make_trainer(mesh, checkpoint=Every(steps=10, keep=9))
empty = Mesh("test")
"""
KEYS = RunKeys("test", "digits")
Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs a command on an app whose run has taken 25 steps."""
    (tmp_path / "trained.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKMESH_URL", redis_url)
    monkeypatch.setenv("TASKMESH_LIVENESS_TTL", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer: Trainer = importlib.import_module("trained").trainer

    async def train() -> None:
        async with trainer.mesh.worker(ONE):
            await trainer.run(steps=25)

    asyncio.run(train())
    yield lambda *arguments: CliRunner().invoke(app, ["checkpoints", *arguments])
    del sys.modules["trained"]


def output(result: Result) -> str:
    assert result.exit_code == 0, result.exception
    return result.output


def record(result: Result) -> Any:
    return json.loads(output(result))


def test_versions_are_listed_shown_verified_and_exported(
    command: Command, tmp_path: Path, plain: redis.Redis
) -> None:
    lines = output(command("list", "trained:trainer")).splitlines()
    assert lines[0].split() == ["VERSION", "STEP", "AGE", "SIZE", "SHARED", "METRICS"]
    assert [line.split()[:2] for line in lines[1:]] == [[str(n), str(n)] for n in (0, 10, 20, 25)]
    assert lines[-1].endswith("current")
    listed = record(command("list", "trained:mesh", "--json"))
    assert [version["step"] for version in listed] == [0, 10, 20, 25]
    assert [version["is_current"] for version in listed] == [False] * 3 + [True]
    assert listed[1]["metrics"]["loss"] > 0
    assert 0 < listed[2]["shared_bytes"] < listed[2]["size_bytes"], "the index at least"
    assert record(command("list", "trained:empty", "--run", "digits", "--json")) == listed

    shown = output(command("show", "trained:trainer", "20"))
    assert "restored_from   -" in shown
    parts = {
        part["name"]: part for part in record(command("show", "trained:trainer", "20", "--json"))["parts"]
    }
    assert set(parts) == {"parameters", "tensors", "state", "index"}
    assert parts["parameters"]["digest"] in shown
    assert (parts["parameters"]["own_chunks"], parts["index"]["own_chunks"]) == (1, 0)

    assert output(command("verify", "trained:trainer")).count("whole") == 4
    key = next(key for key in plain.keys("*:chunk:20:*") if plain.strlen(key) > 1000)
    plain.setrange(key, 9, b"!")
    damaged = command("verify", "trained:trainer", "10", "20")
    assert damaged.exit_code == 1
    assert "chunk 0 of version 20 is corrupt" in damaged.output
    found = json.loads(command("verify", "trained:trainer", "--json").output)
    assert [version["whole"] for version in found] == [True, True, False, True]

    assert "version 25, step 25" in output(command("export", "trained:trainer", "--to", "newest"))
    assert {path.name for path in (tmp_path / "newest").iterdir()} == {MODEL, STATE, MANIFEST}
    output(command("export", "trained:trainer", "10", "--to", "deep/ten"))
    assert (
        json.loads((tmp_path / "deep" / "ten" / MANIFEST).read_text())["record"]["manifest"]["version"] == 10
    )
    _fails(command("export", "trained:trainer", "--to", "newest"), CheckpointError, "is there already")
    _fails(command("export", "trained:trainer", "20", "--to", "other"), CheckpointError, "corrupt")
    assert not (tmp_path / "other").exists()


def test_versions_are_restored_and_removed(command: Command, plain: redis.Redis) -> None:
    assert (
        output(command("rollback", "trained:trainer", "10")) == "version 10 is current again, as version 26\n"
    )
    assert output(command("list", "trained:trainer")).splitlines()[-1].endswith("current, version 10 again")
    assert (
        output(command("prune", "trained:mesh", "--keep", "1", "--dry-run"))
        == "would remove 4: 0, 10, 20, 25\n"
    )
    assert len(record(command("list", "trained:mesh", "--json"))) == 5
    plain.hset(KEYS.lease, mapping={"owner": "somebody", "expires_ms": 2**50})
    _fails(command("prune", "trained:mesh", "--keep", "1"), TrainingError, "is led by somebody")
    _fails(command("rollback", "trained:mesh", "20"), TrainingError, "is led by somebody")
    plain.hset(KEYS.lease, "expires_ms", 0)
    removed = record(command("prune", "trained:mesh", "-k", "1", "--milestone-steps", "20", "--json"))
    assert removed == {"dry_run": False, "versions": [0, 10, 25]}
    assert output(command("prune", "trained:mesh", "--keep", "5")) == "removed 0\n"
    assert output(command("verify", "trained:mesh")).count("whole") == 2, "the chunks of 10 belong to 26 too"
    chunks = len(plain.keys("*:chunk:*"))
    best = record(command("prune", "trained:mesh", "-k", "1", "--best", "loss", "--highest", "--json"))
    assert best["versions"] == [20]
    assert len(plain.keys("*:chunk:*")) < chunks
    assert not plain.exists(KEYS.garbage)


def test_what_cannot_be_done_is_said(command: Command) -> None:
    _fails(command("list", "trained:empty"), ConfigurationError, "has no run: say which run with --run")
    _fails(command("list", "trained:APP"), ConfigurationError, "has no attribute")
    _fails(command("list", "trained:Every"), ConfigurationError, "is not a Mesh")
    _fails(command("show", "trained:mesh", "7"), CheckpointError, "keeps no version 7")
    _fails(command("list", "trained:mesh", "--run", "a b"), ConfigurationError, "run name 'a b'")
    _fails(
        command("rollback", "trained:empty", "10", "-r", "digits"),
        ConfigurationError,
        "no Trainer of run 'digits'",
    )
    _fails(command("export", "trained:empty", "-r", "other", "--to", "x"), CheckpointError, "no version yet")
    assert output(command("list", "trained:empty", "-r", "other")).count("\n") == 1
    assert output(command("verify", "trained:empty", "-r", "other")).count("\n") == 1


def _fails(result: Result, kind: type[TaskmeshError], words: str) -> None:
    assert isinstance(result.exception, kind), result.exception
    assert words in str(result.exception)
