"""The lease's carrier: a thread, or a child process where no thread of this process can be relied on.

Either has connections and an event loop of its own, so that a blocked loop does not lose the lease. A C call that
holds the interpreter lock for longer than the TTL starves a thread, but not the child.
"""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from taskmesh.broker.liveness import BEATS_PER_TTL, Beat
from taskmesh.worker.lease import Keeper, Place, Plan, Report, Word

log = logging.getLogger("taskmesh.worker")
EXIT_BLOCKED = 70
LEASE_PROCESS = "taskmesh.worker.lease_process"


class Host(Protocol):
    """The worker, as its heartbeat sees it; everything is called from other threads."""

    def name_in(self, number: int) -> bytes:
        """The present name in a place; empty while its lease is not to be renewed."""
        ...

    def offset_ms(self) -> int: ...

    def heard(self, number: int, beat: Beat) -> None: ...

    def slack(self) -> float | None:
        """Seconds for which the event loop may go on being blocked; below 0 when the running handlers have overrun
        their limits, None when one of them has no limit."""
        ...


class Heartbeat(Protocol):
    """What carries the lease."""

    def start(self) -> None:
        """Begin."""
        ...

    def end(self) -> None:
        """Renew nothing more: the lease runs out, unless the worker has left. Does not wait."""
        ...

    def stop(self) -> None:
        """End, and wait for it."""
        ...


class ThreadHeartbeat(threading.Thread):
    """A thread. Past ``grace`` seconds of overrun it ends the process, since nothing else can end a handler that
    never gives the loop back."""

    def __init__(self, url: str, places: Sequence[Place], ttl: float, host: Host, grace: float) -> None:
        super().__init__(name="taskmesh heartbeat", daemon=True)
        self._ttl = ttl
        self._host = host
        self._grace = grace
        self._keeper = Keeper(url, places, ttl, host.name_in, host.offset_ms, host.heard)
        self._loop = asyncio.SelectorEventLoop()
        self._ended = False

    def run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._keep())
        except asyncio.CancelledError:
            pass
        finally:
            self._loop.close()

    async def _keep(self) -> None:
        keeping = asyncio.create_task(self._keeper.run())
        try:
            while not self._ended:
                await asyncio.wait([keeping], timeout=self._ttl / BEATS_PER_TTL)
                _end_if_blocked(self._host.slack(), self._grace)
                if keeping.done():
                    break
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    def end(self) -> None:
        self._ended = True
        try:
            self._loop.call_soon_threadsafe(self._cancel_all)
        except RuntimeError:  # closed: it has ended
            pass

    def _cancel_all(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    def stop(self) -> None:
        self.end()
        if self.is_alive():
            self.join(timeout=self._ttl + 1)


class ProcessHeartbeat:
    """A child process (``lease_process.py``), and a thread that talks to it and starts it again if it dies.

    The child ends a worker that has not said a word for longer than its handlers and ``grace`` allow.
    """

    def __init__(self, url: str, places: Sequence[Place], ttl: float, host: Host, grace: float) -> None:
        self._plan = Plan(url, list(places), ttl, os.getpid())
        self._host = host
        self._grace = grace
        self._interval = ttl / BEATS_PER_TTL / 2
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._process = self._launch()
        self._talker = threading.Thread(target=self._talk, name="taskmesh heartbeat", daemon=True)

    def start(self) -> None:
        self._talker.start()

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", LEASE_PROCESS],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)},
            start_new_session=True,  # a terminal's Ctrl-C is the worker's business
        )
        _say(process, self._plan)  # not on the command line, which others can read: the URL has a password
        listen = threading.Thread(target=self._listen, args=[process], name="taskmesh lease", daemon=True)
        listen.start()
        return process

    def _talk(self) -> None:
        while not self._ended.wait(self._interval):
            slack = self._host.slack()
            _end_if_blocked(slack, self._grace)
            names = [self._host.name_in(number) for number in range(len(self._plan.places))]
            patience = None if slack is None else slack + self._grace
            word = Word(names, self._host.offset_ms(), patience, time.monotonic())
            try:
                _say(self._process, word)
            except (OSError, ValueError):
                self._launch_again()

    def _launch_again(self) -> None:
        with self._lock:
            if not self._ended.is_set():
                log.error("the heartbeat's process has died; another one starts")
                self._process.wait()
                self._process = self._launch()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                report = msgspec.json.decode(line, type=Report)
                self._host.heard(report.place, report.beat)

    def end(self) -> None:
        with self._lock:
            self._ended.set()
            self._process.kill()

    def stop(self) -> None:
        self.end()
        self._process.wait()
        if self._talker.is_alive():
            self._talker.join(timeout=1.0)
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except OSError:  # what was left to say
            pass


def _say(process: subprocess.Popen[bytes], what: Plan | Word) -> None:
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(what) + b"\n")
    process.stdin.flush()


def _end_if_blocked(slack: float | None, grace: float) -> None:
    if slack is not None and slack < -grace:
        log.critical("the event loop has been blocked for too long; this worker ends")
        os._exit(EXIT_BLOCKED)


def new_heartbeat(
    kind: str, url: str, places: Sequence[Place], ttl: float, host: Host, grace: float
) -> Heartbeat:
    """A "thread" or a "process"."""
    make: Callable[[str, Sequence[Place], float, Host, float], Heartbeat]
    make = ProcessHeartbeat if kind == "process" else ThreadHeartbeat
    return make(url, places, ttl, host, grace)
