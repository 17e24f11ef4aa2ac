"""Handlers in processes: the worker's side.

A child runs one message at a time, so when it dies it is known whose death that was, and nothing else is lost. The
children are programs started anew, never forks of a running loop, and end when the worker ends, in whatever way.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from taskmesh.codec import encode_message
from taskmesh.errors import ConfigurationError
from taskmesh.settings import MeshSettings
from taskmesh.tasks import TaskDefinition
from taskmesh.worker.deliveries import Delivery
from taskmesh.worker.process_talk import (
    Ended,
    Job,
    Log,
    Main,
    NotLoaded,
    Place,
    Setup,
    Started,
    decode_reply,
    read_frame,
    write_frame,
)

log = logging.getLogger("taskmesh.worker")
MANY_DEATHS = 2
# A run in a process of its own says nothing about a message when its worker dies. So many times its max_deliveries it
# may be delivered: without a bound, a handler that kills the worker from there would go round for ever.
PATIENCE = 10
_STOPS = (signal.SIGTERM, signal.SIGINT)


class ProcessDied(Exception):
    """A child ended while it ran a message; the text says how."""


def is_suspect(delivery: Delivery) -> bool:
    """Whether so many workers died with the message that the next death would condemn it (two as a rule)."""
    deaths, most = delivery.deliveries - 1, delivery.task.options.max_deliveries
    return deaths > 0 and deaths >= min(MANY_DEATHS, most - 1)


class Processes:
    """The children of one worker: started when they are needed, and used again.

    Attributes:
        count: how many there may be.
        takes_any: whether every task can be run in a process.
        are_wanted: whether a task has ``process=True``.

    Raises:
        ConfigurationError: a task with ``process=True`` cannot be imported by a child.
    """

    def __init__(self, tasks: Sequence[TaskDefinition], settings: MeshSettings, count: int) -> None:
        self.count = count
        self._settings = settings
        self._places: dict[str, Place] = {}
        for task in tasks:
            if task.options.process is not False:
                self._find(task)
        self.are_wanted = any(task.options.process for task in tasks)
        self.takes_any = len(self._places) == len(tasks)
        self._idle: list[_Process] = []
        self._all: set[_Process] = set()

    def _find(self, task: TaskDefinition) -> None:
        try:
            self._places[task.name] = find_place(task)
        except LookupError as error:
            if task.options.process:
                raise ConfigurationError(
                    f"task {task.name!r} has process=True, but no other process can import its handler: {error}"
                ) from None

    def take(self, delivery: Delivery) -> bool:
        """Whether a delivery is run in a process: by its task's option, or because it is suspect."""
        wanted = delivery.task.options.process
        return wanted or (wanted is None and is_suspect(delivery) and delivery.task.name in self._places)

    def most_deliveries(self, delivery: Delivery) -> int:
        """Beyond so many deliveries, the deaths of its workers alone condemn a message."""
        most = delivery.task.options.max_deliveries
        return most * PATIENCE if most > 1 and self.take(delivery) else most

    def give_up(self, task: TaskDefinition) -> None:
        """A child could not load this one: run its suspect messages in the worker from now on."""
        self._places.pop(task.name, None)
        self.takes_any = False

    async def run(
        self, delivery: Delivery, keeps_result: bool, on_start: Callable[[], object]
    ) -> Ended | NotLoaded:
        """Run a message's handler in a child of its own; cancelling this kills the child.

        Raises:
            ProcessDied: the child ended on the way.
            OSError: none could be started.
        """
        task, message = delivery.task, delivery.message
        job = Job(
            task.home.name if task.home is not None else "",
            self._places[task.name],
            encode_message(message) if message.blob_chunks else delivery.data,
            delivery.source.queue,
            delivery.deliveries,
            delivery.source.worker.decode(),
            keeps_result,
        )
        process = self._get()
        try:
            reply = await process.run(job, on_start)
        except BaseException:
            self._end(process)
            raise
        self._idle.append(process)
        return reply

    def _get(self) -> _Process:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            self._end(process)
        process = _Process(self._setup())
        self._all.add(process)
        return process

    def _setup(self) -> Setup:
        path = [entry or os.getcwd() for entry in sys.path]  # noqa: PTH109
        return Setup(path, sys.argv, _main(), _log(), self._settings)

    def _end(self, process: _Process) -> None:
        process.kill()
        self._all.discard(process)

    def end_idle(self) -> None:
        """End the children that wait for work."""
        while self._idle:
            self._end(self._idle.pop())

    def close(self) -> None:
        """End them all, whatever they do."""
        self._idle.clear()
        for process in list(self._all):
            self._end(process)


class _Process:
    """One child, from its start on.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._socket, theirs = socket.socketpair()
        end_of_life, self._lifeline = os.pipe()
        try:
            self._popen = _start(theirs.fileno(), end_of_life)
        except BaseException:
            self._socket.close()
            os.close(self._lifeline)
            raise
        finally:
            theirs.close()
            os.close(end_of_life)

    @property
    def is_alive(self) -> bool:
        return self._popen.poll() is None

    async def run(self, job: Job, on_start: Callable[[], object]) -> Ended | NotLoaded:
        """Have it run one message.

        Raises:
            ProcessDied: it ended on the way.
        """
        try:
            if self._streams is None:
                self._streams = await asyncio.open_connection(sock=self._socket)
                await write_frame(self._streams[1], self._setup)
            reader, writer = self._streams
            await write_frame(writer, job)
            reply = decode_reply(await read_frame(reader))
            if isinstance(reply, Started):
                on_start()
                reply = decode_reply(await read_frame(reader))
            assert not isinstance(reply, Started)
            return reply
        except (OSError, asyncio.IncompleteReadError):
            self._kill_group()
            code = await asyncio.to_thread(self._popen.wait)
            raise ProcessDied(_how(code)) from None

    def kill(self) -> None:
        """End it, and the programs that its handler has started, at once."""
        self._kill_group()
        if self._streams is not None:
            self._streams[1].transport.abort()
        else:
            self._socket.close()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        if self._popen.returncode is None:  # a large one takes its time to go
            threading.Thread(target=self._popen.wait, name="taskmesh reap", daemon=True).start()

    def _kill_group(self) -> None:
        # It may have closed its socket and go on; and once it is waited for, its number may be another's.
        if self._popen.returncode is None:
            try:
                os.killpg(self._popen.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass


def _start(talk: int, lifeline: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]
    command += ["-m", "taskmesh.worker.process_main", str(talk), str(lifeline)]
    # In a session of its own, so that a terminal's Ctrl-C does not reach it; what a service manager sends to all
    # processes is held until it can look away.
    held = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)
    try:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=(talk, lifeline), start_new_session=True
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


def _how(code: int) -> str:
    """A process's end in words."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def find_place(task: TaskDefinition) -> Place:
    """Where another process finds a task.

    Raises:
        LookupError: nowhere; the text says why.
    """
    module = str(getattr(task.function, "__module__", None))
    qualname = str(getattr(task.function, "__qualname__", type(task.function).__qualname__))
    if "<locals>" in qualname:
        raise LookupError(f"{qualname} is defined inside a function; define it at the top of a module")
    if module == "__main__" and _main() is None:
        raise LookupError("it was defined in an interactive session; define it in a file")
    found: Any = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    if getattr(found, "definition", None) is not task:
        raise LookupError(
            f"{module}.{qualname} is not this task; decorate it with @mesh.task where it is defined"
        )
    return Place(module, qualname)


def _main() -> Main | None:
    """This program, as a child can import it."""
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None and spec.name != "__main__":  # as it is for a folder or an archive
        return Main(spec.name, None)
    return None if path is None else Main(None, os.path.abspath(path))  # noqa: PTH100


def _log() -> Log | None:
    """The root logger's level and format, where it has a handler."""
    root = logging.getLogger()
    if not root.handlers:
        return None
    style = getattr(root.handlers[0].formatter, "_fmt", None)
    return Log(root.level, style or logging.BASIC_FORMAT)
