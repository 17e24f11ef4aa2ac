"""Several worker processes under one that starts them, replaces the dead and passes signals on.

The processes are programs started anew, never forks of a running loop. They are in a process group of their own, so
that a terminal's Ctrl-C reaches them through the supervisor alone, once; and they drain when their standard input
ends, so that they do not outlive a supervisor that was killed.
"""

from __future__ import annotations

import logging
import queue
import signal
import subprocess
import time
from dataclasses import dataclass, field
from types import FrameType

import msgspec

from taskmesh.cli.worker_process import EXIT_UNFIT, GRACE, Plan, command

log = logging.getLogger("taskmesh.supervisor")
SHORT_LIFE = 5.0
FIRST_PAUSE = 0.5
LONGEST_PAUSE = 30.0


def pause_before_restart(short_lives: int) -> float:
    """Seconds to wait after so many lives in a row that ended at once."""
    return 0.0 if short_lives == 0 else min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** (short_lives - 1))


@dataclass(slots=True)
class _Child:
    """One place for a process; ``start_at`` is when the next one is due while there is none."""

    number: int
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    start_at: float = field(default_factory=time.monotonic)
    short_lives: int = 0


class Supervisor:
    """Keeps ``count`` worker processes alive until a signal comes, and waits for their drain."""

    def __init__(self, plan: Plan, count: int) -> None:
        self._plan = msgspec.structs.replace(plan, supervised=True)
        self._children = [_Child(number) for number in range(1, count + 1)]
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._kill_at: float | None = None
        self._exit_code = 0

    def run(self) -> int:
        """Supervise; returns the exit code: 0 when every process has drained."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, self._on_signal)
        while True:
            for child in self._children:
                self._look_after(child)
            if self._kill_at is not None and not any(child.process for child in self._children):
                return self._exit_code
            self._handle(self._next_signal())

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.put(number)  # a SimpleQueue's put may interrupt its get

    def _next_signal(self) -> int | None:
        """The next signal, or None when it is time to look at the children again."""
        now = time.monotonic()
        if self._kill_at is None:
            due = [child.start_at for child in self._children if child.process is None]
        else:
            due = [self._kill_at]
        try:
            return self._signals.get(timeout=max(0.01, min([now + 1.0, *due]) - now))
        except queue.Empty:
            return None

    def _handle(self, number: int | None) -> None:
        if number in (signal.SIGTERM, signal.SIGINT):
            if self._kill_at is None:
                self._drain()
            else:
                log.error("second signal: the worker processes are killed")
                self._kill()
        elif self._kill_at is not None and time.monotonic() >= self._kill_at:
            log.error("the drain took too long: the worker processes are killed")
            self._kill()

    def _look_after(self, child: _Child) -> None:
        if child.process is None:
            if self._kill_at is None and time.monotonic() >= child.start_at:
                self._start(child)
            return
        code = child.process.poll()
        if code is None:
            return
        pid, lived = child.process.pid, time.monotonic() - child.started
        if child.process.stdin is not None:
            child.process.stdin.close()
        child.process = None
        if self._kill_at is not None:
            drained = code in (0, -signal.SIGTERM)  # by the signal itself: it had not begun to work
            self._exit_code = self._exit_code or int(not drained)
            return
        if code == EXIT_UNFIT:  # it has said why
            self._exit_code = 1
            self._drain()
            return
        child.short_lives = child.short_lives + 1 if lived < SHORT_LIFE else 0
        pause = pause_before_restart(child.short_lives)
        child.start_at = time.monotonic() + pause
        how = f"by signal {-code}" if code < 0 else f"with code {code}"
        log.warning(
            "worker process %d (pid %d) ended %s after %.1f s; another starts in %g s",
            *(child.number, pid, how, lived, pause),
        )

    def _start(self, child: _Child) -> None:
        child.started = time.monotonic()
        child.process = subprocess.Popen(command(self._plan), stdin=subprocess.PIPE, process_group=0)
        log.info("worker process %d: pid %d", child.number, child.process.pid)

    def _drain(self) -> None:
        self._kill_at = time.monotonic() + self._plan.drain_timeout + GRACE + 2.0
        for child in self._children:
            if child.process is not None:
                child.process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._exit_code = 1
        for child in self._children:
            if child.process is not None:
                child.process.kill()
