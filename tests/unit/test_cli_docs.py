"""Every command and option of the command line is in docs/cli.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from taskmesh.cli.main import app

DOCUMENT = Path(__file__).parents[2] / "docs" / "cli.md"


def commands(command: Any, path: tuple[str, ...] = ("taskmesh",)) -> Iterator[tuple[str, Any]]:
    """Every command with its full name, the groups themselves included."""
    yield " ".join(path), command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, (*path, name))


def section(text: str, name: str) -> str:
    """What stands under the heading of a command, up to the next heading."""
    _, found, rest = text.partition(f"# `{name}`\n")
    assert found, f"docs/cli.md has no heading `{name}`"
    return rest.partition("\n#")[0]


@pytest.mark.parametrize(("name", "command"), list(commands(typer.main.get_command(app))))
def test_it_is_documented(name: str, command: Any) -> None:
    text = section(DOCUMENT.read_text(), name)
    assert text.strip(), f"docs/cli.md says nothing of {name}"
    for parameter in command.params:
        if parameter.name == "help":
            continue
        if parameter.param_type_name == "argument":
            word = parameter.metavar.strip("[].")
            assert f"`{word}`" in text, f"docs/cli.md does not tell of {name} {word}"
            continue
        for option in (*parameter.opts, *parameter.secondary_opts):
            assert f"`{option}" in text, f"docs/cli.md does not tell of {name} {option}"
