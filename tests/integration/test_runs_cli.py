"""``taskmesh runs`` on a real run."""

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

from taskmesh import CheckpointError, ConfigurationError, TaskmeshError
from taskmesh.cli.main import app
from taskmesh.keys import RunKeys
from taskmesh.training import Trainer
from tests.integration.training_support import ONE

APP = """
from taskmesh import Mesh
from taskmesh.training import Every
from tests.integration.training_support import IMAGES, LABELS, loss, make_trainer

mesh = Mesh("test")
trainer = make_trainer(mesh, checkpoint=Every(steps=4, keep=9), schedule=None)
other = make_trainer(mesh, "other")
empty = Mesh("test")


def mean_loss(model):
    return loss(model, (IMAGES, LABELS)).mean()


class changed:
    mesh = Mesh("test")
    name = "digits"


def double(model, batch):
    return 2 * loss(model, batch)


make_trainer(changed.mesh, checkpoint=Every(steps=4, keep=9), schedule=None, loss=double)
"""
KEYS = RunKeys("test", "digits")
Command = Callable[..., Result]


@pytest.fixture
def command(tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Command]:
    """Runs a command on an app whose run has taken 10 steps, and went back from step 10 to step 8."""
    (tmp_path / "looked_at.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TASKMESH_URL", redis_url)
    monkeypatch.setenv("TASKMESH_LIVENESS_TTL", "1")
    monkeypatch.syspath_prepend(str(tmp_path))
    trainer: Trainer = importlib.import_module("looked_at").trainer

    async def train() -> None:
        async with trainer.mesh.worker(ONE):
            await trainer.run(steps=10)
            await trainer.rollback(to=8)

    asyncio.run(train())
    yield lambda *arguments: CliRunner().invoke(app, ["runs", *arguments])
    del sys.modules["looked_at"]


def output(result: Result) -> str:
    assert result.exit_code == 0, result.exception
    return result.stdout


def record(result: Result) -> Any:
    return json.loads(output(result))


def test_runs_are_listed_with_their_ledger(command: Command, plain: redis.Redis) -> None:
    lines = output(command("list", "looked_at:mesh")).splitlines()
    assert lines[0].split() == ["RUN", "VERSION", "STEP", "LOSS", "AGE", "CHECKPOINTS", "LED", "BY"]
    assert [line.split()[:3] for line in lines[1:]] == [["digits", "11", "8"], ["other", "-", "-"]]
    assert lines[1].endswith("nobody")
    plain.hset(KEYS.lease, mapping={"owner": "somebody", "expires_ms": 2**50})
    (digits,) = record(command("list", "looked_at:empty", "--run", "digits", "--json"))
    assert (digits["run"], digits["version"], digits["step"]) == ("digits", 11, 8)
    assert (digits["checkpoints"], digits["leader"]) == ([0, 4, 8, 10, 11], "somebody")
    assert digits["loss"] > 0 and digits["age"] < 60
    assert record(command("list", "looked_at:empty", "--json")) == []

    lines = output(command("ledger", "looked_at:trainer")).splitlines()
    assert lines[0].split() == ["VERSION", "STEP", "FROM", "SAMPLES", "FORMED", "BY"]
    assert lines[-1].split() == ["11", "8", "8", "0", "version", "8", "again"]
    assert lines[1].split()[:4] == ["1", "1", "0", "128"] and lines[1].endswith(" 0-7")
    entries = record(command("ledger", "looked_at:trainer", "-n", "3", "--json"))
    assert [entry["version"] for entry in entries] == [9, 10, 11]
    share = entries[0]["shares"][2]
    assert (share["shard"], share["samples"]) == (2, 16)
    by_it = record(command("ledger", "looked_at:trainer", "--worker", share["worker"], "--json"))
    assert [entry["version"] for entry in by_it] == list(range(1, 11))
    assert record(command("ledger", "looked_at:trainer", "--worker", "nobody", "--json")) == []


def test_versions_are_formed_again(command: Command) -> None:
    lines = output(command("replay", "looked_at:trainer")).splitlines()
    assert lines[0].split() == ["VERSION", "STEP", "DIGEST", "THE", "RUN'S"]
    assert [line.split()[0] for line in lines[1:]] == [*map(str, range(1, 9)), "11"]
    assert all(line.endswith("the same") for line in lines[1:])
    part = record(command("replay", "looked_at:trainer", "--from", "4", "--to", "10", "--json"))
    assert [(each["version"], each["matches"]) for each in part] == [(n, True) for n in range(5, 11)]
    changed = command("replay", "looked_at:changed")
    assert changed.exit_code == 1
    assert changed.output.count("DIFFERENT") == 9
    _fails(command("replay", "looked_at:trainer", "--from", "5"), CheckpointError, "keeps no version 5")
    _fails(command("replay", "looked_at:mesh"), ConfigurationError, "has digits, other: say which run")
    _fails(
        command("replay", "looked_at:empty", "-r", "digits"), ConfigurationError, "no Trainer of run 'digits'"
    )


def test_the_version_that_turned_bad_is_found(command: Command) -> None:
    """Learning has made the loss smaller and smaller: from some version on it is no longer above a limit."""
    search = ("bisect", "looked_at:trainer", "--metric", "looked_at:mean_loss", "--bad", "10")
    found = record(command(*search, "--at-least", "2.1", "--json"))
    assert 1 <= found["version"] < 10
    assert found["version"] == found["step"] == found["entry"]["version"]
    assert found["evaluations"] <= 6
    said = command(*search, "--at-least", "2.1")
    assert f"version {found['version']}, step {found['version']}, is the first bad one" in output(said)
    assert said.stderr.count("looked_at:mean_loss") == found["evaluations"]
    _fails(command(*search), ConfigurationError, "--at-most or --at-least")
    _fails(
        command(*search, "--at-most", "0.1"), ConfigurationError, "version 0, where the search begins, is bad"
    )
    _fails(command(*search, "--at-most", "9"), ConfigurationError, "is not bad")
    _fails(
        command("bisect", "looked_at:trainer", "-m", "looked_at:KEYS", "--at-most", "1"),
        ConfigurationError,
        "has no attribute",
    )


def _fails(result: Result, kind: type[TaskmeshError], words: str) -> None:
    assert isinstance(result.exception, kind), result.exception
    assert words in str(result.exception)


def test_a_run_is_deleted(command: Command, plain: redis.Redis) -> None:
    def left() -> set[bytes]:
        """Keys of the run that do not go by themselves."""
        return {key for key in plain.scan_iter(b"taskmesh:{test:run:digits*") if plain.pttl(key) == -1}

    before, token = left(), int(plain.hget(KEYS.lease, "token") or 0)
    plain.hset(KEYS.lease, mapping={"owner": "somebody", "expires_ms": 2**50})
    refused = command("delete", "looked_at:mesh", "--run", "digits", "--yes")
    assert isinstance(refused.exception, TaskmeshError) and "is led by somebody" in str(refused.exception)
    plain.hset(KEYS.lease, "expires_ms", 0)
    asked = command("delete", "looked_at:mesh", "--run", "digits")
    assert asked.exit_code == 1 and "Delete run digits with its 5 checkpoints?" in asked.stdout
    assert left() == before
    said = output(command("delete", "looked_at:empty", "--run", "digits", "--yes"))
    assert said == "run digits is deleted, with 5 checkpoints\n"
    assert left() == {KEYS.lease}
    (digits,) = record(command("list", "looked_at:empty", "--run", "digits", "--json"))
    assert (digits["version"], digits["checkpoints"], digits["leader"]) == (None, [], None)
    assert int(plain.hget(KEYS.lease, "token") or 0) > token, "a master of before is refused"
    assert output(command("delete", "looked_at:trainer", "--yes")).startswith("run digits is deleted, with 0")
