"""One worker process: loads the Mesh, serves its queues, drains when it is told to.

It is a program, ``python -m taskmesh.cli.worker_process PLAN`` with a ``Plan`` as JSON: ``taskmesh worker`` becomes it,
or a supervisor starts several. It imports neither typer nor rich, which would stay with a worker for its whole life.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType

import msgspec

from taskmesh.app.mesh import Mesh
from taskmesh.cli.console import report, start_log
from taskmesh.cli.loading import load_mesh
from taskmesh.errors import BrokerRefused, ConfigurationError, ServerTooOld
from taskmesh.settings import WorkerSettings

try:
    import uvloop
except ImportError:  # not on this platform
    new_event_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop

log = logging.getLogger("taskmesh.worker")
DEFAULTS = WorkerSettings()
SHORT_TTL = 5.0
EXIT_UNFIT = 78  # EX_CONFIG: starting it again would not help
GRACE = 10.0  # beyond the drain's own timeout: outcomes to settle, queues to leave, connections to close


class Plan(msgspec.Struct, frozen=True):
    """What a worker process is to do.

    Attributes:
        app: the Mesh, as ``module:attribute``.
        supervised: a supervisor started it: it drains when its standard input ends (the supervisor is gone), and
            leaves it to the supervisor to end it the hard way.
        group: torchrun started it, and others that are to be one worker with it.
    """

    app: str
    queues: tuple[str, ...] = ()
    concurrency: int = DEFAULTS.concurrency
    handler_procs: int | None = DEFAULTS.processes
    drain_timeout: float = DEFAULTS.drain_timeout
    log_level: str = "info"
    debug: bool = False
    supervised: bool = False
    group: bool = False

    @property
    def settings(self) -> WorkerSettings:
        return WorkerSettings(
            queues=self.queues,
            concurrency=self.concurrency,
            processes=self.handler_procs,
            drain_timeout=self.drain_timeout,
        )


class StopSignals:
    """SIGTERM and SIGINT: the first asks for a drain, the second ends the process at once, whatever it does.

    They are Python's own handlers and not the loop's, so that the second one works while a handler blocks the loop.
    """

    def __init__(self, plan: Plan) -> None:
        self.requested = False
        self._plan = plan
        self._then: Callable[[], object] | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        if self._plan.supervised:
            threading.Thread(target=self._watch_supervisor, name="taskmesh supervisor", daemon=True).start()

    def on_request(self, then: Callable[[], object]) -> None:
        """Call this in the running loop when the first signal comes, or now if it has come."""
        loop = asyncio.get_running_loop()
        self._then = lambda: loop.call_soon_threadsafe(then)
        if self.requested:
            then()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested:
            self._request()
        elif not self._plan.supervised:
            os.write(2, b"taskmesh: second signal: ended at once, without a drain\n")
            os._exit(1)

    def _request(self) -> None:
        self.requested = True
        overdue = threading.Timer(self._plan.drain_timeout + GRACE, self._overdue)
        overdue.daemon = True
        overdue.start()
        if self._then is not None:
            self._then()

    def _overdue(self) -> None:
        log.error("the drain took too long; this process ends")
        os._exit(1)

    def _watch_supervisor(self) -> None:
        while os.read(0, 1):
            pass
        if not self.requested:
            log.warning("the supervisor is gone: this worker drains")
            self._request()


async def serve(mesh: Mesh, plan: Plan, stop: StopSignals) -> None:
    """Serve until a signal comes, then drain.

    Raises:
        TaskmeshError: the worker could not start.
    """
    stopped = asyncio.Event()
    starting = asyncio.current_task()
    assert starting is not None
    stop.on_request(starting.cancel)
    try:
        async with mesh.worker(_with_heartbeat(plan.settings, mesh.settings.liveness_ttl)):
            stop.on_request(stopped.set)
            if mesh.settings.url is None:  # a submitter in another folder would wait for ever
                folder = mesh.settings.data_folder.resolve()
                log.info("no server is named (TASKMESH_URL): this is the local one of %s", folder)
            await stopped.wait()
            log.info("draining for up to %g s; another signal ends this process at once", plan.drain_timeout)
    except asyncio.CancelledError:
        if not stop.requested:
            raise
        log.info("stopped before it had started")


async def serve_together(mesh: Mesh, plan: Plan, stop: StopSignals) -> None:
    """Serve as one worker with the other ranks: one of them serves, until a signal comes, and the others end with it.

    Raises:
        TaskmeshError: as ``serve``; or the ranks do not meet.
    """
    group = await importlib.import_module("taskmesh.training.torchrun").join(mesh)  # it brings torch
    log.info("rank %d of a group of %d", group.ranks.rank, group.ranks.size)
    if not group.leads:
        await group.assist()
        return
    async with group.lead():
        await serve(mesh, plan, stop)


def _with_heartbeat(settings: WorkerSettings, ttl: float) -> WorkerSettings:
    """A lease of a few seconds is carried by a process: a C call may well hold a thread up for so long."""
    is_short = ttl < SHORT_TTL and sys.platform == "linux"
    return dataclasses.replace(settings, heartbeat="process" if is_short else "thread")


def run(plan: Plan) -> int:
    """Be a worker process; returns its exit code.

    Raises:
        TaskmeshError: it could not start.
    """
    start_log(plan.log_level)
    stop = StopSignals(plan)
    stop.install()
    mesh = load_mesh(plan.app)
    known = mesh.registry.queues
    for queue in plan.queues:
        if queue not in known:
            there_are = ", ".join(known) or "none"
            raise ConfigurationError(
                f"no task of Mesh {mesh.name!r} is on queue {queue!r} (there are: {there_are})"
            )
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve_together(mesh, plan, stop) if plan.group else serve(mesh, plan, stop))
        _leave_threads_behind()
    return 0


def _leave_threads_behind() -> None:
    """End the process now if a handler still runs in a thread, which Python would wait for.

    Its message was handed back, and may run elsewhere by now.
    """
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("taskmesh_")]
    for thread in threads:
        thread.join(0.2)  # an idle one is on its way out
    stuck = [thread for thread in threads if thread.is_alive()]
    if stuck:
        log.warning("%d threads may still run handlers; they end with the process", len(stuck))
        logging.shutdown()
        os._exit(0)


def command(plan: Plan) -> list[str]:
    """The command line of such a process."""
    return [sys.executable, "-m", __spec__.name, msgspec.json.encode(plan).decode()]


def main() -> int:
    """Run the plan in the first argument; errors are one line on stderr."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    try:
        return run(plan)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        report(error, debug=plan.debug)
        is_unfit = isinstance(error, (ConfigurationError, BrokerRefused, ServerTooOld))
        return EXIT_UNFIT if is_unfit and plan.supervised else 1


if __name__ == "__main__":
    sys.exit(main())
