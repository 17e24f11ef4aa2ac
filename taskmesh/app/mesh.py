"""The Mesh: tasks by name, over one server."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from taskmesh.app.client import Client
from taskmesh.app.task import Task
from taskmesh.broker import deadletter
from taskmesh.clock import Clock, SystemClock
from taskmesh.errors import ConfigurationError
from taskmesh.events import Observer, Observers
from taskmesh.keys import check_name
from taskmesh.messages import DeadLetter, Priority
from taskmesh.monitoring.metrics import CountingObserver
from taskmesh.monitoring.snapshot import RunReader
from taskmesh.results.handle import Handle
from taskmesh.settings import Durability, MeshSettings, QueueOptions, WorkerSettings, from_environment
from taskmesh.tasks import (
    DEFAULT_QUEUE,
    MAX_DELIVERIES,
    NO_RETRY,
    Batch,
    Context,
    Middleware,
    Registry,
    Retry,
    TaskDefinition,
    TaskOptions,
)
from taskmesh.worker.runtime import Worker

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class _Anything:
    """For type checkers: a first parameter that takes even this is no Context but ``Any`` or ``object``."""


class _Decorator:
    """What ``@mesh.task(...)`` returns: it registers the handler that it is applied to."""

    def __init__(
        self, mesh: Mesh, name: str | None, options: TaskOptions, local_names: Mapping[str, Any]
    ) -> None:
        self._mesh = mesh
        self._name = name
        self._options = options
        self._local_names = local_names

    @overload
    def __call__(
        self, function: Callable[Concatenate[_Anything, P], Awaitable[R]], /
    ) -> Task[Concatenate[Any, P], R]: ...
    @overload
    def __call__(
        self, function: Callable[Concatenate[_Anything, P], R], /
    ) -> Task[Concatenate[Any, P], R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[Any, Any]:
        return self._mesh.add_task(function, self._name, self._options, self._local_names)


class _BatchDecorator:
    """The same for handlers that take lists: one submission is one item."""

    def __init__(self, decorator: _Decorator) -> None:
        self._decorator = decorator

    @overload
    def __call__(
        self, function: Callable[[Context, list[T]], Awaitable[Sequence[R | Exception]]], /
    ) -> Task[[T], R]: ...
    @overload
    def __call__(
        self, function: Callable[[Context, list[T]], Sequence[R | Exception]], /
    ) -> Task[[T], R]: ...
    @overload
    def __call__(
        self, function: Callable[[list[T]], Awaitable[Sequence[R | Exception]]], /
    ) -> Task[[T], R]: ...
    @overload
    def __call__(self, function: Callable[[list[T]], Sequence[R | Exception]], /) -> Task[[T], R]: ...
    def __call__(self, function: Callable[..., Any], /) -> Task[Any, Any]:
        return self._decorator(function)


class Mesh:
    """Tasks by name, over one server.

    Enter it (``async with mesh:``) to submit; a worker process does that by itself (``taskmesh worker app:mesh``).

    Args:
        name: part of every key; Meshes of different names do not see each other.
        url: the Redis or Valkey to use, over ``TASKMESH_URL``; without either a local server is started, and
            shared by the processes of the same data folder.
        settings: everything else (by default from the environment).
        queues: bounds of queues by name.
        middleware: the onion around every handler, outermost first.
        observers: who watches.

    Attributes:
        metrics: what this process has counted so far.
        runs: the training runs over this Mesh, which register themselves to be part of its snapshots.

    Raises:
        ConfigurationError: the name cannot stand in a key.
    """

    def __init__(
        self,
        name: str,
        url: str | None = None,
        *,
        settings: MeshSettings | None = None,
        queues: Mapping[str, QueueOptions] | None = None,
        middleware: Sequence[Middleware] = (),
        observers: Sequence[Observer] = (),
        clock: Clock | None = None,
    ) -> None:
        self.name = check_name("mesh", name)
        settings = settings or from_environment()
        self.settings = dataclasses.replace(settings, url=url) if url is not None else settings
        self.queues: dict[str, QueueOptions] = dict(queues or {})
        self.registry = Registry()
        self.metrics = CountingObserver()
        self.runs: dict[str, RunReader] = {}
        self.observers = Observers([self.metrics, *observers])
        self.middleware: list[Middleware] = list(middleware)
        self.clock: Clock = clock or SystemClock()
        self._client: Client | None = None
        self._entered = 0

    def __repr__(self) -> str:
        return f"<Mesh {self.name!r} with {len(list(self.registry))} tasks>"

    # connection

    async def __aenter__(self) -> Mesh:
        while self._client is None:
            client = await Client.connect(self.name, self.settings, self.queues, self.clock, self.observers)
            if self._client is None:
                self._client = client
            else:  # another task was quicker
                await client.close()
        self._entered += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered == 0 and self._client is not None:
            client, self._client = self._client, None
            await client.close()

    @property
    def is_connected(self) -> bool:
        """Whether somebody has entered it."""
        return self._client is not None

    @property
    def client(self) -> Client:
        """The connection.

        Raises:
            ConfigurationError: the Mesh is not entered.
        """
        if self._client is None:
            raise ConfigurationError(f"Mesh {self.name!r} is not connected: use it inside `async with mesh:`")
        return self._client

    # tasks

    @overload
    def task(
        self, function: Callable[Concatenate[_Anything, P], Awaitable[R]], /
    ) -> Task[Concatenate[Any, P], R]: ...
    @overload
    def task(self, function: Callable[Concatenate[_Anything, P], R], /) -> Task[Concatenate[Any, P], R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[Concatenate[Context, P], R], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, Awaitable[R]], /) -> Task[P, R]: ...
    @overload
    def task(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        batch: Batch,
        queue: str = DEFAULT_QUEUE,
        retry: Retry = NO_RETRY,
        timeout: float | None = None,
        expires: float | None = None,
        priority: Priority = Priority.NORMAL,
        result_ttl: float | None = None,
        raises: tuple[type[Exception], ...] = (),
        max_deliveries: int = MAX_DELIVERIES,
        durability: Durability | None = None,
        sensitive: tuple[str, ...] = (),
        process: Literal[False] | None = None,
        in_hand: int | None = None,
    ) -> _BatchDecorator: ...
    @overload
    def task(
        self,
        *,
        name: str | None = None,
        queue: str = DEFAULT_QUEUE,
        retry: Retry = NO_RETRY,
        timeout: float | None = None,
        expires: float | None = None,
        priority: Priority = Priority.NORMAL,
        result_ttl: float | None = None,
        raises: tuple[type[Exception], ...] = (),
        max_deliveries: int = MAX_DELIVERIES,
        durability: Durability | None = None,
        sensitive: tuple[str, ...] = (),
        process: bool | None = None,
        in_hand: int | None = None,
    ) -> _Decorator: ...
    def task(self, *function: Callable[..., Any], **options: Any) -> Any:
        """Register a handler: ``@mesh.task`` or ``@mesh.task(queue="mail", retry=Retry(attempts=5))``.

        The options are those of ``TaskOptions``. The task's name is the function's own unless given; a first
        parameter annotated ``Context`` receives the run's Context and is no part of the call. Handlers that are
        not async run in threads; those with ``process=True`` in processes. With ``batch`` the handler takes a list
        and returns one result (or exception) for each item.

        Raises:
            ConfigurationError: the name is taken, or an option cannot work.
        """
        local_names = sys._getframe(1).f_locals
        name = options.pop("name", None)
        known = [field.name for field in dataclasses.fields(TaskOptions)]
        for option in options:
            if option not in known:
                raise ConfigurationError(
                    f"a task has no option {option!r}; there are: name, {', '.join(known)}"
                )
        if function:
            return self.add_task(function[0], name, TaskOptions(), local_names)
        decorator = _Decorator(self, name, TaskOptions(**options), local_names)
        return _BatchDecorator(decorator) if options.get("batch") is not None else decorator

    def add_task(
        self,
        function: Callable[..., Any],
        name: str | None = None,
        options: TaskOptions | None = None,
        local_names: Mapping[str, Any] | None = None,
    ) -> Task[Any, Any]:
        """Register a handler without the decorator."""
        named = name or str(getattr(function, "__name__", ""))
        definition = TaskDefinition(named, function, options or TaskOptions(), dict(local_names or {}))
        definition.home = self
        self.registry.add(definition)
        return Task(definition, self)

    async def submit(self, task: str, /, *args: Any, **kwargs: Any) -> Handle[Any]:
        """Submit a task by its name.

        Raises:
            UnknownTask: there is none of that name here; otherwise as ``Task.submit``.
        """
        return await self.get_task(task).submit(*args, **kwargs)

    def get_task(self, name: str) -> Task[Any, Any]:
        """The task of that name.

        Raises:
            UnknownTask: there is none.
        """
        return Task(self.registry[name], self)

    # workers

    @asynccontextmanager
    async def worker(self, settings: WorkerSettings | None = None) -> AsyncIterator[Worker]:
        """A worker inside this application, for as long as the block runs; it drains at the end.

        Raises:
            ConfigurationError: no task is registered, or a queue is named that cannot be.
            BrokerError: the server cannot be reached.
        """
        settings = settings or WorkerSettings()
        queues = settings.queues or tuple(self.registry.queues)
        if not queues:
            raise ConfigurationError(f"Mesh {self.name!r} has no tasks: define them before the worker starts")
        for queue in queues:
            check_name("queue", queue)
        async with self:
            partitions = [each for queue in queues for each in self.client.partitions(queue)]
            worker = Worker(
                partitions, self.registry, self.settings, settings, self.observers, self.middleware
            )
            async with worker:
                yield worker

    # dead letters

    async def dead_letters(self, queue: str = DEFAULT_QUEUE, count: int = 100) -> list[DeadLetter]:
        """The oldest dead and parked messages of a queue, with the reason of each."""
        found = await asyncio.gather(
            *(deadletter.dead_letters(each, count) for each in self.client.partitions(queue))
        )
        letters = [letter for each in found for letter in each]
        return letters if len(found) == 1 else sorted(letters, key=lambda letter: letter.at_ms)[:count]

    async def requeue(self, letter: DeadLetter) -> bool:
        """Put a dead letter back into its queue, as a first attempt; False when it is no longer there.

        Raises:
            DecodeError: its bytes are not a message.
        """
        client = self.client
        if letter.message is not None:
            client.inbox(letter.queue, letter.partition).void(letter.message.id)
        return await deadletter.requeue(client.partition(letter.queue, letter.partition), letter)

    async def discard(self, letter: DeadLetter) -> bool:
        """Throw a dead letter away for good; False when it is no longer there."""
        return await deadletter.discard(self.client.partition(letter.queue, letter.partition), letter)
