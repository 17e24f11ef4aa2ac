"""The documentation's code runs as it is printed: each page's Python blocks, in order, as a newcomer would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.DOTALL)
NAMED = re.compile(r"# (\w+\.py)\n")
WORKER = """
import asyncio, importlib, runpy, sys

async def main() -> None:
    module = importlib.import_module(sys.argv[1])
    async with module.mesh.worker():
        for script in sys.argv[2:]:
            process = await asyncio.create_subprocess_exec(sys.executable, script)
            assert await process.wait() == 0, script

asyncio.run(main())
"""


def _blocks(page: str) -> list[str]:
    return BLOCK.findall((ROOT / page).read_text())


def _lay_out(folder: Path, pages: list[str]) -> tuple[list[str], list[str]]:
    """Write the blocks to files: those that name their file, and the scripts that use them."""
    modules, scripts = [], []
    for page in pages:
        for number, block in enumerate(_blocks(page)):
            named = NAMED.match(block)
            name = named[1] if named else f"{Path(page).stem}_{number}.py"
            (folder / name).write_text(block)
            runs = "asyncio.run(" in block
            (scripts if runs else modules).append(name)
    return modules, scripts


def _run(folder: Path, arguments: list[str]) -> None:
    environment = {**os.environ, "TASKMESH_DATA": str(folder / "data"), "PYTHONPATH": str(folder)}
    for name in ("TASKMESH_URL", "TASKMESH_BULK_URL"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("pages", "app"),
    [
        (["README.md"], "app"),
        (["docs/quickstart.md"], "app"),
        (["docs/training.md", "docs/scoring.md"], "scores"),
    ],
    ids=["readme", "quickstart", "training and scoring"],
)
def test_the_pages_code_runs(pages: list[str], app: str, tmp_path: Path) -> None:
    modules, scripts = _lay_out(tmp_path, pages)
    assert f"{app}.py" in modules
    assert scripts
    for module in modules:
        _run(tmp_path, ["-c", f"import {Path(module).stem}"])
    (tmp_path / "serve.py").write_text(WORKER)
    _run(tmp_path, ["serve.py", app, *scripts])


def test_the_tests_of_the_testing_page_pass(tmp_path: Path) -> None:
    _lay_out(tmp_path, ["docs/testing.md"])
    _run(tmp_path, ["-m", "pytest", "-q", "-p", "no:cacheprovider"])


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
