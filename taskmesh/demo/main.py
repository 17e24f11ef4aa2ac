"""The demo's frame: a folder, an environment and a display for its story."""

from __future__ import annotations

import asyncio
import json as json_format
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from taskmesh.demo.processes import Workers
from taskmesh.demo.screen import Screen

LIVENESS_TTL = 1.0


def run_demo(json: bool = False) -> int:
    """Run the demo; returns the process's exit code: 0 when everything held.

    With ``json`` the last line of standard output is one JSON object, and the story goes to standard error.
    """
    folder = Path(tempfile.mkdtemp(prefix="taskmesh-demo-"))
    environment = {"TASKMESH_DATA": str(folder), "TASKMESH_LIVENESS_TTL": str(LIVENESS_TTL)}
    os.environ.update(environment)
    for name in ("TASKMESH_URL", "TASKMESH_BULK_URL"):  # the demo brings its own servers
        os.environ.pop(name, None)
    logging.getLogger("taskmesh").setLevel(logging.ERROR)  # the story tells of what it warns of
    screen = Screen(to_stderr=json)
    try:
        with screen, Workers(folder, environment) as workers:
            screen.say("Starting local servers, a master and its workers ...")
            from taskmesh.demo.story import Story  # its Mesh reads the environment that was set above

            report = asyncio.run(Story(screen, workers).tell())
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    screen.summary(asdict(report), report.held)
    if json:
        sys.stdout.write(json_format.dumps(asdict(report)) + "\n")
    return 0 if report.held else 1
