"""The child of a worker: a program of its own that runs handlers, one message at a time.

``python -m taskmesh.worker.process_main TALK LIFELINE``: descriptors of a socket over which the worker speaks
(``taskmesh.worker.process_talk``), and of a pipe over which nothing ever comes, until its other end is gone with the
worker. Then this process ends at once, whatever it does.

It leaves SIGTERM and SIGINT to the worker, which drains: they may have gone to all processes of a group.
"""

from __future__ import annotations

import asyncio
import contextvars
import fcntl
import importlib
import logging
import os
import random
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import msgspec

from taskmesh.codec import decode_message, encode_outcome, encode_success
from taskmesh.errors import BrokerError
from taskmesh.messages import Message, Outcome, Status
from taskmesh.tasks import Context, Home, TaskDefinition
from taskmesh.worker import calls, middleware
from taskmesh.worker.calls import Calls
from taskmesh.worker.outcome import failure_of, judge
from taskmesh.worker.process_talk import (
    Ended,
    Job,
    Main,
    NotLoaded,
    Place,
    Setup,
    Started,
    decode_job,
    decode_setup,
    read_frame,
    write_frame,
)
from taskmesh.worker.redact import redactor_of

log = logging.getLogger("taskmesh.worker")
MAIN = "__taskmesh_main__"  # what the worker's __main__ is called here, so that it does not run as a program
_STOPS = (signal.SIGTERM, signal.SIGINT)
_ENGINE_FILES = (__file__, calls.__file__, middleware.__file__)


class Child:
    """Serves one worker."""

    def __init__(self, setup: Setup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._setup = setup
        self._reader = reader
        self._writer = writer
        self._tasks: dict[Place, TaskDefinition] = {}
        self._calls: dict[str, Calls] = {}
        self._connected: set[str] = set()

    async def serve(self) -> None:
        """Run what comes.

        Raises:
            asyncio.IncompleteReadError: the worker has ended.
        """
        while True:
            job = decode_job(await read_frame(self._reader))
            message = decode_message(job.message)
            try:
                task, home = self._load(job, message.task)
                if task.is_async or home.middleware:
                    await self._connect(home)
            except (Exception, SystemExit) as error:
                await write_frame(self._writer, NotLoaded(_why_not_loaded(job, message.task, error)))
                continue
            await write_frame(self._writer, Started())
            running = asyncio.create_task(self._run(job, task, message), context=contextvars.Context())
            await write_frame(self._writer, await running)

    def _load(self, job: Job, name: str) -> tuple[TaskDefinition, Home]:
        task = self._tasks.get(job.place)
        if task is None:
            found: Any = _import(job.place.module, self._setup.main)
            for part in job.place.qualname.split("."):
                found = getattr(found, part)
            task = getattr(found, "definition", None)
        if not isinstance(task, TaskDefinition) or task.home is None:
            raise ImportError(f"{'.'.join(job.place)} is not a task here")
        if (task.home.name, task.name) != (job.mesh, name):
            raise ImportError(f"{'.'.join(job.place)} is task {task.name!r} of Mesh {task.home.name!r} here")
        if job.mesh not in self._calls:
            task.home.settings = self._setup.settings
            self._calls[job.mesh] = Calls(list(task.home.middleware), 1)
        self._tasks[job.place] = task
        return task, task.home

    async def _connect(self, home: Home) -> None:
        """Enter the Mesh, so that handlers can submit. Their time does not run before the server is there."""
        while home.name not in self._connected:
            try:
                await home.__aenter__()
                self._connected.add(home.name)
            except BrokerError as error:
                log.debug("a process of a worker waits for the server: %s", error)
                await asyncio.sleep(0.5)

    async def _run(self, job: Job, task: TaskDefinition, message: Message) -> Ended:
        try:
            args, kwargs = task.signature.convert(message.args, message.kwargs)
        except Exception as error:  # InvalidArguments, or whatever a user's own type raises
            return _failed(job, task, message, error, final=True)
        context = Context(
            message.id,
            message.task,
            job.queue,
            message.attempt,
            job.deliveries,
            job.worker,
            task.options.retry.attempts,
        )
        is_batch = task.options.batch is not None
        if is_batch:
            args, kwargs = ([args[0]],), {}
        try:
            value = await self._calls[job.mesh].make(task, args, kwargs, context)
            if is_batch:
                value = _only_row(task, value)
        except (Exception, asyncio.CancelledError) as error:
            return _failed(job, task, message, error)
        except BaseException as error:
            return _failed(job, task, message, error, final=True)
        if not job.keeps_result:
            return Ended(b"", succeeded=True)
        try:
            return Ended(encode_success(value), succeeded=True)
        except Exception as error:
            raised = TypeError(f"the result of task {task.name!r} cannot travel: {error}")
            return _failed(job, task, message, raised, final=True)


def _only_row(task: TaskDefinition, values: Any) -> Any:
    rows = list(values)
    if len(rows) != 1:
        raise TypeError(f"batch handler of {task.name!r} must return one result for each of its 1 rows")
    if isinstance(rows[0], Exception):
        raise rows[0]
    return rows[0]


def _failed(
    job: Job, task: TaskDefinition, message: Message, error: BaseException, *, final: bool = False
) -> Ended:
    verdict = judge(error, message.attempt, task.options.retry, random.Random().random())
    failure = failure_of(error, _ENGINE_FILES, redactor_of(task, message, job.message))
    if MAIN in sys.modules:  # to the worker, and to whoever submits, it is __main__
        name = f"{sys.modules[MAIN].__name__}."
        failure = msgspec.structs.replace(
            failure,
            type=failure.type.replace(name, "__main__."),
            traceback=failure.traceback.replace(name, ""),
        )
    outcome = encode_outcome(Outcome(Status.FAILED, failure=failure))
    return Ended(outcome, False, None if final else verdict.delay, verdict.reason)


def _import(name: str, main: Main | None) -> ModuleType:
    if name != "__main__":
        return importlib.import_module(name)
    if MAIN in sys.modules:
        return sys.modules[MAIN]
    if main is None:
        raise ImportError("the worker's program has no file")
    if main.module is not None:
        module = importlib.import_module(main.module)
    else:
        path = Path(main.path or "")
        module = ModuleType(MAIN)
        module.__file__ = str(path)
        sys.modules[MAIN] = module
        try:
            exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
        except BaseException:
            del sys.modules[MAIN]
            raise
    sys.modules[MAIN] = sys.modules["__main__"] = module
    return module


def _why_not_loaded(job: Job, task: str, error: BaseException) -> str:
    text = f"a process cannot load task {task!r}: {type(error).__name__}: {error}"
    if job.place.module == "__main__" and isinstance(error, RuntimeError):
        text += ' (a program that processes import starts its work under `if __name__ == "__main__":`)'
    return text


def _end_with(lifeline: int) -> None:
    """See that this process ends when the other end of the pipe is closed."""
    if sys.platform == "linux":
        # The kernel itself then ends the process group: no thread of ours need get the interpreter lock for that.
        signal.signal(signal.SIGIO, signal.SIG_DFL)
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    threading.Thread(target=_watch, args=(lifeline,), name="taskmesh lifeline", daemon=True).start()


def _watch(lifeline: int) -> None:
    os.read(lifeline, 1)
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _look_away() -> None:
    """Let the worker alone heed signals to stop; what a handler starts or forks heeds them as ever."""
    for number in _STOPS:
        signal.signal(number, _ignore)
    os.register_at_fork(before=_hold, after_in_parent=_release, after_in_child=_heed)
    _release()


def _ignore(number: int, frame: FrameType | None) -> None:
    """Not SIG_IGN, which other programs would inherit."""


def _hold() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOPS)


def _release() -> None:
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPS)


def _heed() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _release()  # what was sent to it as soon as it was there has been held


async def _serve(talk: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=talk))
    setup = decode_setup(await read_frame(reader))
    sys.path[:], sys.argv[:] = setup.path, setup.argv
    if setup.log is not None:
        logging.basicConfig(level=setup.log.level, format=setup.log.format, stream=sys.stderr)
    await Child(setup, reader, writer).serve()


def main() -> None:
    """Serve the worker at the other end of the descriptors named on the command line."""
    talk, lifeline = map(int, sys.argv[1:])
    _look_away()
    _end_with(lifeline)
    try:
        asyncio.run(_serve(talk))
    except (asyncio.IncompleteReadError, ConnectionError):
        os._exit(0)  # the worker has ended, or wants this process no more


if __name__ == "__main__":
    main()
