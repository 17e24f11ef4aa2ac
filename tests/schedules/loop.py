"""Event loops whose time is virtual, and the timeline that they share.

Each process of a schedule has loops of its own, so that one can stand still (a stopped process, a blocked loop)
while the others go on. Nothing ever sleeps: when no loop has anything to do, the time jumps.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BEGIN = 1000.0
EPOCH_MS = 1_700_000_000_000


class Timeline:
    """Virtual seconds, and what is to happen when.

    Args:
        draw: decides who goes first among those that are due at once; None keeps the order of their making.
    """

    def __init__(self, draw: random.Random | None) -> None:
        self.now = BEGIN
        self.loops: list[VirtualLoop] = []
        self._draw = draw
        self._due: list[tuple[float, float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._numbers = itertools.count()

    def at(self, when: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have ``action`` called at that time."""
        tie = self._draw.random() if self._draw is not None else 0.0
        heapq.heappush(self._due, (when, tie, next(self._numbers), action, arguments))

    def run(self, until: Callable[[], bool], limit: float) -> bool:
        """Let time pass until a condition holds, looked at between any two steps; False when ``limit`` came first."""
        while not until():
            if not self._step(limit):
                return False
        return True

    def _step(self, limit: float) -> bool:
        due, soonest = [], math.inf
        for loop in self.loops:
            when = loop.next_time()
            soonest = min(soonest, when)
            if when <= self.now:
                due.append(loop)
        if due:
            chosen = due[0] if len(due) == 1 or self._draw is None else self._draw.choice(due)
            chosen.turn()
            return True
        when = min(soonest, self._due[0][0] if self._due else math.inf)
        if when > limit:
            self.now = max(self.now, limit)
            return False
        self.now = max(self.now, when)
        if self._due and self._due[0][0] <= self.now:
            _, _, _, action, arguments = heapq.heappop(self._due)
            action(*arguments)
        return True

    @contextmanager
    def governing(self) -> Iterator[None]:
        """While it lasts, ``time.monotonic`` is this timeline's."""
        real = time.monotonic
        time.monotonic = lambda: self.now
        try:
            yield
        finally:
            time.monotonic = real


class VirtualLoop(asyncio.BaseEventLoop):
    """One event loop of one process; the timeline turns it.

    Attributes:
        process: whose it is.
        frozen_until: it does not turn before that.
        faults: what asyncio reported: exceptions that nobody took.
    """

    def __init__(self, timeline: Timeline, process: Any) -> None:
        super().__init__()
        self._timeline = timeline
        self._selector = _Nothing()
        self._clock_resolution = 1e-9
        self.process = process
        self.frozen_until = 0.0
        self.faults: list[str] = []
        self.set_exception_handler(self._note)
        timeline.loops.append(self)

    def time(self) -> float:
        return self._timeline.now

    def next_time(self) -> float:
        """When it has something to do: a time in the past means now."""
        when = math.inf
        if self._ready:
            when = 0.0
        else:
            scheduled = self._scheduled
            while scheduled and scheduled[0]._cancelled:
                self._timer_cancelled_count -= 1
                heapq.heappop(scheduled)._scheduled = False
            if scheduled:
                when = scheduled[0]._when
        return max(when, self.frozen_until)

    def turn(self) -> None:
        """Run what is due, once."""
        asyncio._set_running_loop(self)
        try:
            self._run_once()
        finally:
            asyncio._set_running_loop(None)

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """Threads take no time here, and are none."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def retire(self) -> None:
        """Never turn again; the tasks that are left are ended without a word."""
        if self in self._timeline.loops:
            self._timeline.loops.remove(self)
        for _ in range(20):
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            for _ in range(5):
                self._ready and self.turn()
        for task in asyncio.all_tasks(self):
            task._log_destroy_pending = False
        self.close()
        self.process = None

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.faults.append(f"{context.get('message')}: {context.get('exception')!r}")

    # what BaseEventLoop expects of those that wait for sockets

    def _process_events(self, events: list[Any]) -> None:
        pass

    def _write_to_self(self) -> None:
        pass


class _Nothing:
    """A selector with nothing to wait for."""

    def select(self, timeout: float | None) -> list[Any]:
        return []
