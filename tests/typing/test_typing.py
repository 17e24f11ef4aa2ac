"""What ``mypy --strict`` says of programs that use taskmesh."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def mypy(program: str) -> list[str]:
    """The errors, as "line: code"."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--strict",
            "--config-file=",
            "--no-error-summary",
            "--hide-error-context",
            str(HERE / program),
        ],
        capture_output=True,
        text=True,
        timeout=110,
        cwd=ROOT,
    )
    lines = [line for line in done.stdout.splitlines() if program in line and ": error:" in line]
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return [re.sub(r"^.*?:(\d+): error: .*\[([\w-]+)\]$", r"\1: \2", line) for line in lines]


def test_right_programs_are_accepted() -> None:
    assert mypy("samples_right.py") == []


def test_every_wrong_line_is_an_error_and_no_other() -> None:
    expected: dict[int, set[str]] = {}
    for number, line in enumerate((HERE / "samples_wrong.py").read_text().splitlines(), 1):
        if marked := re.search(r"# wrong: ([\w -]+)$", line):
            expected[number] = set(marked[1].split())
    found: dict[int, set[str]] = {}
    for error in mypy("samples_wrong.py"):
        line, code = error.split(": ")
        found.setdefault(int(line), set()).add(code)
    assert set(found) == set(expected)
    for number, codes in found.items():
        assert codes <= expected[number], f"line {number}: {codes}"
