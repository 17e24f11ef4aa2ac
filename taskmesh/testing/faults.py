"""Faults at exact places: the nth time that a worker passes a point, it dies.

A worker process is killed by its own SIGKILL. A worker inside a test's process is abandoned: nothing is finished,
settled or handed back, and its lease runs out, which is all that Redis ever sees of a killed process.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from taskmesh.app.mesh import Mesh
from taskmesh.events import Event, Fetched, Settled
from taskmesh.tasks import Call, Next
from taskmesh.worker.runtime import Worker

VARIABLE = "TASKMESH_TEST_FAIL_AT"


class Point(StrEnum):
    """Where a worker may die: deliveries received; before a handler; after it and before the settle; settled."""

    FETCHED = "fetched"
    STARTED = "started"
    FINISHED = "finished"
    SETTLED = "settled"


class Fault:
    """A middleware and an observer that counts the passes of one point and acts at the nth."""

    def __init__(self, point: Point | str, act: Callable[[], object], nth: int = 1) -> None:
        self.point = Point(point)
        self.passes = 0
        self._nth = nth
        self._act = act

    def _pass(self, point: Point) -> bool:
        if point is not self.point:
            return False
        self.passes += 1
        if self.passes != self._nth:
            return False
        self._act()
        return True

    async def __call__(self, call: Call, call_next: Next) -> Any:
        """The middleware."""
        if self._pass(Point.STARTED):
            await asyncio.Future()  # abandoned here
        value = await call_next(call)
        if self._pass(Point.FINISHED):
            await asyncio.Future()
        return value

    def on_event(self, event: Event) -> None:
        """The observer."""
        if isinstance(event, Fetched) and event.deliveries:
            self._pass(Point.FETCHED)
        elif isinstance(event, Settled):
            self._pass(Point.SETTLED)


def fail_at(worker: Worker, point: Point | str, nth: int = 1) -> Fault:
    """Abandon ``worker`` (of this process) the nth time that it passes ``point``."""
    fault = Fault(point, worker.abandon, nth)
    worker.watch_with(fault, fault)
    return fault


def arm(mesh: Mesh, point: Point | str, nth: int = 1) -> Fault:
    """Kill this process the nth time that a worker of ``mesh`` passes ``point``. Before the worker starts."""
    fault = Fault(point, lambda: os.kill(os.getpid(), signal.SIGKILL), nth)
    mesh.middleware.append(fault)
    mesh.observers.add(fault)
    return fault


def arm_from_environment(mesh: Mesh) -> Fault | None:
    """The same as ``TASKMESH_TEST_FAIL_AT`` says ("started" or "started:3"). Only test programs call this."""
    text = os.environ.get(VARIABLE)
    if not text:
        return None
    point, _, nth = text.partition(":")
    return arm(mesh, point, int(nth or 1))
