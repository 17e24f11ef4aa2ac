"""The public names, and what importing them costs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import taskmesh

PUBLIC = [
    "Batch",
    "BoundCall",
    "BrokerError",
    "BrokerFull",
    "BrokerRefused",
    "BrokerUnavailable",
    "Call",
    "Cancelled",
    "CheckpointError",
    "ConfigurationError",
    "Context",
    "DeadLetter",
    "DecodeError",
    "Durability",
    "EmbeddedServerError",
    "Handle",
    "Handles",
    "InvalidArguments",
    "LeadershipLost",
    "Mesh",
    "MeshSettings",
    "Next",
    "NotConfirmed",
    "PayloadTooLarge",
    "Priority",
    "QueueFull",
    "QueueOptions",
    "ResultError",
    "ResultTimeout",
    "ResultUnavailable",
    "Retry",
    "ServerTooOld",
    "SubmitError",
    "Task",
    "TaskCancelled",
    "TaskExpired",
    "TaskFailed",
    "TaskmeshError",
    "TrainingError",
    "UnknownTask",
    "Worker",
    "WorkerSettings",
    "as_completed",
]

# The processor time, which a busy machine does not stretch as it does the time on the clock.
MEASURE = "import time; begin = time.process_time(); import {module}; print(time.process_time() - begin)"
RUNS = 7
ALLOWED_SECONDS = 0.050


def python(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout


def test_the_public_names_are_these() -> None:
    assert sorted(taskmesh.__all__) == sorted(PUBLIC)
    for name in taskmesh.__all__:
        member = getattr(taskmesh, name)
        assert not isinstance(member, type) or member.__doc__, f"{name} has no docstring"


def test_the_error_tree_is_the_one_drawn_in_its_docstring() -> None:
    from taskmesh import errors

    drawn = errors.__doc__ or ""
    for name, member in vars(errors).items():
        if isinstance(member, type) and issubclass(member, errors.TaskmeshError):
            assert f"{name} " in drawn or f"{name}\n" in drawn, f"{name} is not drawn"


def test_importing_taskmesh_brings_neither_torch_nor_numpy() -> None:
    modules = json.loads(python("import json, sys, taskmesh; print(json.dumps(sorted(sys.modules)))"))
    assert not {"torch", "numpy", "sklearn", "rich", "typer", "starlette"} & set(modules)


def test_importing_taskmesh_costs_little_more_than_its_client_library(tmp_path: Path) -> None:
    # Byte code is cached, as it is where a package is installed, whatever the environment of the tests says.
    cached = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    python("import taskmesh", **cached)
    ours: list[float] = []
    theirs: list[float] = []
    for _ in range(RUNS):  # in turns, so that a busy machine slows both alike
        theirs.append(float(python(MEASURE.format(module="redis.asyncio"), **cached)))
        ours.append(float(python(MEASURE.format(module="taskmesh"), **cached)))
    difference = statistics.median(ours) - statistics.median(theirs)
    assert difference <= ALLOWED_SECONDS, f"{difference * 1000:.0f} ms more than `import redis.asyncio`"
