"""What a task is: its handler and options, the Context that a run of it sees, and the registry of a Mesh."""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from taskmesh.errors import ConfigurationError, TaskmeshError, UnknownTask
from taskmesh.keys import check_name
from taskmesh.messages import Priority
from taskmesh.settings import Durability, MeshSettings
from taskmesh.signatures import Signature

DEFAULT_QUEUE = "default"
MAX_DELIVERIES = 3
REDACTED = "***"


@dataclass(frozen=True, slots=True)
class Retry:
    """When and how often a task that failed is tried again.

    The pause before try n + 1 is ``delay * factor ** (n - 1)`` seconds, at most ``max_delay``; ``jitter`` is the
    share of it that is drawn at random, so that what failed together does not come back together.

    Attributes:
        attempts: tries in all; 1 never tries again.
        on: the exceptions that are worth another try.
    """

    attempts: int = 3
    delay: float = 1.0
    factor: float = 2.0
    max_delay: float = 300.0
    jitter: float = 0.5
    on: tuple[type[Exception], ...] = (Exception,)

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.delay < 0 or self.factor < 1 or not 0 <= self.jitter <= 1:
            raise ConfigurationError(
                f"{self}: attempts from 1, delay from 0, factor from 1, jitter from 0 to 1"
            )

    def pause_after(self, attempt: int, draw: float) -> float:
        """Seconds to wait after the given try has failed; ``draw`` is uniform in [0, 1)."""
        whole = min(self.max_delay, self.delay * self.factor ** min(attempt - 1, 64))
        return whole * (1 - self.jitter * draw)


NO_RETRY = Retry(attempts=1)


@dataclass(frozen=True, slots=True)
class Batch:
    """How single submissions are gathered into one call of the handler.

    Attributes:
        max_rows: the handler never gets more.
        max_wait: seconds that the oldest may wait for others, counted from its arrival in the worker.
    """

    max_rows: int = 64
    max_wait: float = 0.002

    def __post_init__(self) -> None:
        if self.max_rows < 1 or self.max_wait < 0:
            raise ConfigurationError(f"{self}: max_rows from 1, max_wait from 0")


@dataclass(frozen=True, slots=True)
class TaskOptions:
    """What a task may say beside its name. Durations are seconds.

    Attributes:
        queue: where its messages wait.
        retry: when a failure is tried again.
        timeout: a run that takes longer fails with TimeoutError.
        expires: a message that has not started by then is dropped.
        priority: its lane.
        result_ttl: how long its results are kept; 0 keeps none, None takes the Mesh's.
        batch: gathers submissions; the handler then takes and returns lists.
        raises: exception types that ``result()`` raises as themselves.
        max_deliveries: a message that so many workers, or processes, died with is dead-lettered.
        sensitive: parameters whose values are shown nowhere: not in failures and their tracebacks, nor in logs or by
            the command line.
        durability: what a submit waits for; None takes the Mesh's.
        process: True runs the handler in a process of its own. False never does; None only when two workers died with
            the message, so that a third death takes no worker along (if a process can import the handler).
        in_hand: messages of its queue that a worker takes at once, whatever its concurrency: for handlers that take
            turns anyway, so that the rest is left to other workers. The least that a task of the queue says counts.
    """

    queue: str = DEFAULT_QUEUE
    retry: Retry = NO_RETRY
    timeout: float | None = None
    expires: float | None = None
    priority: Priority = Priority.NORMAL
    result_ttl: float | None = None
    batch: Batch | None = None
    raises: tuple[type[Exception], ...] = ()
    max_deliveries: int = MAX_DELIVERIES
    sensitive: tuple[str, ...] = ()
    durability: Durability | None = None
    process: bool | None = None
    in_hand: int | None = None

    def __post_init__(self) -> None:
        check_name("queue", self.queue)
        self._check_types()
        for name in ("timeout", "expires"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigurationError(f"{name} is {value} s; it must be positive")
        if self.max_deliveries < 1:
            raise ConfigurationError(f"max_deliveries is {self.max_deliveries}; it must be at least 1")
        if self.in_hand is not None and self.in_hand < 1:
            raise ConfigurationError(f"in_hand is {self.in_hand}; it must be at least 1")
        if self.result_ttl is not None and self.result_ttl < 0:
            raise ConfigurationError(f"result_ttl is {self.result_ttl} s; it cannot be negative")

    def _check_types(self) -> None:
        """What would otherwise show only when a worker fails at it, such as ``retry=3``."""
        if not isinstance(self.retry, Retry):
            raise ConfigurationError(f"retry is {self.retry!r}; write retry=Retry(attempts=3)")
        if not isinstance(self.priority, Priority):
            raise ConfigurationError(f"priority is {self.priority!r}; write priority=Priority.HIGH")
        if not (self.batch is None or isinstance(self.batch, Batch)):
            raise ConfigurationError(f"batch is {self.batch!r}; write batch=Batch(max_rows=64)")
        if not (self.durability is None or isinstance(self.durability, Durability)):
            raise ConfigurationError(
                f"durability is {self.durability!r}; write durability=Durability(replicas=1)"
            )
        if self.process and self.batch is not None:
            raise ConfigurationError("process=True with a batch: a process runs one message at a time")
        if not isinstance(self.raises, tuple):
            raise ConfigurationError(f"raises is {self.raises!r}; write a tuple of exception types")
        if not isinstance(self.sensitive, tuple):
            raise ConfigurationError(f"sensitive is {self.sensitive!r}; write a tuple of parameter names")


class RetryLater(TaskmeshError):
    """Raised by ``Context.retry``: try this message again, whatever ``Retry.on`` says."""

    def __init__(self, delay: float | None) -> None:
        super().__init__("the handler asked for another try")
        self.delay = delay


class PassOn(TaskmeshError):
    """Raised by ``Context.pass_to``: another worker is to have this message."""

    def __init__(self, worker: str) -> None:
        super().__init__(f"the handler passed the message on to {worker}")
        self.worker = worker


@dataclass(slots=True)
class Context:
    """What a handler may know of its run. A parameter annotated with it receives it; callers do not pass it.

    Attributes:
        task_id: the message's id, the same in every attempt.
        task: the task's name.
        queue: where it came from.
        attempt: 1 for the first try; a retry raises it.
        deliveries: how often this message was handed to a worker; above 1 when a worker died with it.
        worker: who runs it.
        max_attempts: tries in all.
    """

    task_id: str
    task: str
    queue: str
    attempt: int
    deliveries: int
    worker: str
    max_attempts: int = 1
    _cancelled: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def cancelled(self) -> bool:
        """Whether someone asked to cancel this run: for handlers in threads, which cannot be stopped from outside."""
        return self._cancelled.is_set()

    def retry(self, delay: float | None = None) -> NoReturn:
        """Give this try up and ask for another one after ``delay`` seconds (None: as the task's Retry says).

        It counts as a try; when they are spent the task has failed.

        Raises:
            ValueError: the delay is endless, or no number.
        """
        if delay is not None and not delay < math.inf:
            raise ValueError(f"delay is {delay} s; it must be finite")
        raise RetryLater(delay)

    def pass_to(self, worker: str) -> NoReturn:
        """Let another worker run this, by its name (``Context.worker`` there): one that has what it takes at hand.

        It does not count as a try. Where that worker is not there (any more), or does not serve this queue, the message
        goes to whoever is free, a moment later. Not for handlers that run in processes of their own.
        """
        raise PassOn(worker)


class Home(Protocol):
    """The Mesh that a task belongs to, as a process that runs the handler needs it."""

    name: str
    settings: MeshSettings
    middleware: list[Middleware]

    async def __aenter__(self) -> object: ...


class TaskDefinition:
    """A registered task: the handler with all that the engine needs to know of it.

    Attributes:
        home: the Mesh that it is registered with.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        options: TaskOptions,
        local_names: Mapping[str, Any],
    ) -> None:
        self.name = check_name("task", name)
        self.function = function
        self.options = options
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        if inspect.isasyncgenfunction(function) or inspect.isgeneratorfunction(function):
            raise ConfigurationError(
                f"task {name!r}: a handler returns its result; generators are not supported"
            )
        self.signature = Signature(function, name, Context, local_names, options.batch is not None)
        self.signature.keep_secret(options.sensitive)
        self.raises = {type_name(kind): kind for kind in options.raises}
        self.home: Home | None = None

    def __repr__(self) -> str:
        return f"<task {self.name!r} on queue {self.options.queue!r}>"

    def shown(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by parameter, the sensitive ones redacted; None when they do not fit the handler."""
        named = self.signature.named(args, kwargs)
        if named is None:
            return None
        return {name: REDACTED if name in self.options.sensitive else value for name, value in named.items()}

    def sensitive_values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
        """The values of the sensitive parameters; all of them when which is which cannot be told."""
        named = self.signature.named(args, kwargs)
        if named is None:
            return [*args, *kwargs.values()]
        return [named[name] for name in self.options.sensitive if name in named]


def type_name(kind: type) -> str:
    """An exception class as it is named on the wire: qualified, builtins bare."""
    module = kind.__module__
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


class Registry:
    """The tasks of one Mesh, by name.

    Attributes:
        leaving: what a worker does when its handlers have ended, while it still counts as alive.
    """

    def __init__(self) -> None:
        self._tasks: dict[str, TaskDefinition] = {}
        self.leaving: list[Callable[[], Awaitable[None]]] = []
        self.get = self._tasks.get

    def add(self, definition: TaskDefinition) -> None:
        """Register a task.

        Raises:
            ConfigurationError: the name is taken.
        """
        taken = self._tasks.get(definition.name)
        if taken is not None:
            raise ConfigurationError(
                f"two tasks are named {definition.name!r}: give one of them a name of its own"
            )
        self._tasks[definition.name] = definition

    def __getitem__(self, name: str) -> TaskDefinition:
        try:
            return self._tasks[name]
        except KeyError:
            known = ", ".join(sorted(self._tasks)) or "none"
            raise UnknownTask(f"no task {name!r} in this Mesh (there are: {known})") from None

    def __iter__(self) -> Iterator[TaskDefinition]:
        return iter(self._tasks.values())

    @property
    def queues(self) -> list[str]:
        """The queues that the tasks name, in order of registration."""
        return list(dict.fromkeys(task.options.queue for task in self))


class Call:
    """One run of a handler, as middleware sees it: what is called, with what, and its Context."""

    __slots__ = ("args", "context", "kwargs", "task")

    def __init__(
        self, task: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context
    ) -> None:
        self.task = task
        self.args = args
        self.kwargs = kwargs
        self.context = context


Next = Callable[[Call], Awaitable[Any]]
Middleware = Callable[[Call, Next], Awaitable[Any]]
