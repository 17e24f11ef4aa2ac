"""What the programs here share: the object that TASKMESH_APP names, and a run that SIGTERM ends."""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

import uvloop

from taskmesh import ConfigurationError, TaskmeshError, WorkerSettings

log = logging.getLogger("workers")


def load() -> Any:
    """The object that TASKMESH_APP names, as ``module:attribute``: a trainer, a scorer or a Mesh."""
    target = os.environ.get("TASKMESH_APP", "")
    name, _, attribute = target.partition(":")
    if not (name and attribute):
        raise ConfigurationError(
            f"TASKMESH_APP is {target!r}: write module:attribute, as in examples.digits:trainer"
        )
    try:
        return getattr(importlib.import_module(name), attribute)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"TASKMESH_APP is {target!r}: {error}") from error


def whole_number(name: str, default: int) -> int:
    """A whole number from the environment."""
    text = os.environ.get(name) or str(default)
    if not text.isdecimal():
        raise ConfigurationError(f"{name} is {text!r}: write a whole number")
    return int(text)


async def serve(concurrency: int) -> None:
    """Be a worker for the app's Mesh, on the queues of TASKMESH_QUEUES (all without it), until cancelled."""
    found = load()
    queues = tuple(filter(None, os.environ.get("TASKMESH_QUEUES", "").split(",")))
    concurrency = whole_number("TASKMESH_CONCURRENCY", concurrency)
    async with getattr(found, "mesh", found).worker(WorkerSettings(queues=queues, concurrency=concurrency)):
        await asyncio.Event().wait()


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run ``main`` until it returns, or until SIGTERM or SIGINT cancels it; errors are one line and exit code 1."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    async def until_stopped() -> None:
        task = asyncio.ensure_future(main())
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            log.info("stopped")

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(until_stopped())
    except TaskmeshError as error:
        sys.exit(f"{type(error).__name__}: {error}")
