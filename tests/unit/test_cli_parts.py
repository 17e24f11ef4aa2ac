"""The command line's parts that need no process."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from types import ModuleType, SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from taskmesh import ConfigurationError
from taskmesh.cli.console import duration, table
from taskmesh.cli.main import app, demo
from taskmesh.cli.supervisor import LONGEST_PAUSE, pause_before_restart


def test_a_process_that_dies_again_and_again_waits_longer_and_longer() -> None:
    pauses = [pause_before_restart(lives) for lives in range(10)]
    assert pauses[:4] == [0.0, 0.5, 1.0, 2.0]
    assert pauses == sorted(pauses) and pauses[-1] == LONGEST_PAUSE


def test_tables_align_numbers_to_the_right() -> None:
    assert table(("NAME", "COUNT"), [("a", 5), ("long name", 12345)]) == (
        "NAME       COUNT\na              5\nlong name  12345"
    )
    assert table(("NAME", "COUNT"), []) == "NAME  COUNT"


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(None, "-"), (0.08, "80 ms"), (2.5, "2.5 s"), (720.0, "12 min"), (11_160.0, "3.1 h")],
)
def test_durations_in_short(seconds: float | None, said: str) -> None:
    assert duration(seconds) == said


@pytest.mark.parametrize(("missing", "named"), [("torch", "torch"), ("sklearn.datasets", "sklearn")])
def test_the_demo_names_the_extra_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, missing: str, named: str
) -> None:
    def fail(name: str) -> ModuleType:
        raise ModuleNotFoundError(name=missing)

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigurationError, match=rf"needs {named}: pip install 'taskmesh\[demo\]'"):
        demo()


def test_the_demo_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(name: str) -> SimpleNamespace:
        assert name == "taskmesh.demo.main"
        return SimpleNamespace(run_demo=lambda json: 3 if json else 0)

    monkeypatch.setattr(importlib, "import_module", find)
    with pytest.raises(typer.Exit) as ended:
        demo(as_json=True)
    assert ended.value.exit_code == 3


def test_the_version_is_the_package_s() -> None:
    ended = CliRunner().invoke(app, ["--version"])
    assert (ended.exit_code, ended.stdout) == (0, f"{version('taskmesh')}\n")


def test_no_line_of_the_help_is_cut_short() -> None:
    for arguments in (["--help"], ["dead", "--help"], ["checkpoints", "--help"], ["runs", "--help"]):
        assert "..." not in CliRunner().invoke(app, arguments).stdout.partition("Commands:")[2]
