"""A Mesh in the terminal: queues, workers, servers and training runs, looked at every second.

    TASKMESH_APP=app:mesh TASKMESH_URL=redis://... python dashboards/terminal.py [--interval 1] [--once]

What ``taskmesh top`` shows, as a program over the public API, and a place to start from for a view of your own.
``--once`` prints one look and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import sys
from pathlib import Path

from rich.console import Console

from taskmesh import Mesh, TaskmeshError
from taskmesh.monitoring import snapshot
from taskmesh.monitoring.terminal import render, watch


def load() -> Mesh:
    """The Mesh of the object that TASKMESH_APP names, as ``module:attribute``; the working directory is looked in."""
    target = os.environ.get("TASKMESH_APP", "")
    name, _, attribute = target.partition(":")
    if not (name and attribute):
        sys.exit(f"TASKMESH_APP is {target!r}: write module:attribute, as in app:mesh")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        sys.exit(f"TASKMESH_APP is {target!r}: {error}")
    mesh = getattr(found, "mesh", found)
    if not isinstance(mesh, Mesh):
        sys.exit(f"TASKMESH_APP is {target!r}: that is no Mesh")
    return mesh


async def show_once(mesh: Mesh) -> None:
    async with mesh:
        Console().print(render(await snapshot(mesh)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Watch a Mesh in the terminal until Ctrl-C.")
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="look once and end")
    options = parser.parse_args()
    mesh = load()
    try:
        asyncio.run(show_once(mesh) if options.once else watch(mesh, options.interval))
    except KeyboardInterrupt:
        pass
    except TaskmeshError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
