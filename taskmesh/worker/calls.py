"""How a handler is called: with its Context, inside its middlewares, in a thread where it is not async."""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from taskmesh.tasks import Call, Context, Middleware, Next, TaskDefinition
from taskmesh.worker.deliveries import Delivery
from taskmesh.worker.middleware import compose


class Calls:
    """Makes the coroutines that run handlers.

    Args:
        threads: how many handlers may run in threads at once.
    """

    def __init__(self, middlewares: list[Middleware], threads: int) -> None:
        self._middlewares = middlewares
        self._thread_count = threads
        self._composed: Next | None = None
        self._threads: ThreadPoolExecutor | None = None

    def add_middleware(self, middleware: Middleware) -> None:
        """One more, innermost."""
        self._middlewares.append(middleware)
        self._composed = None

    def context(self, delivery: Delivery) -> Context:
        """What the handler may know of this run."""
        message = delivery.message
        return Context(
            message.id,
            message.task,
            delivery.source.queue,
            message.attempt,
            delivery.deliveries,
            delivery.source.worker.decode(),
            delivery.task.options.retry.attempts,
        )

    def context_if_wanted(self, delivery: Delivery) -> Context | None:
        """The same, but None where nobody would look at it: it costs as much as an empty handler."""
        task = delivery.task
        if task.signature.context is not None or self._middlewares or not task.is_async:
            return self.context(delivery)
        return None

    def make(
        self, task: TaskDefinition, args: tuple[Any, ...], kwargs: dict[str, Any], context: Context | None
    ) -> Any:
        """The coroutine that runs the handler inside its middlewares."""
        if context is None:
            return task.function(*args, **kwargs)
        if self._composed is None:
            self._composed = compose(self._middlewares, self._innermost)
        return self._composed(Call(task, args, kwargs, context))

    async def _innermost(self, call: Call) -> Any:
        task = call.task
        args, kwargs = task.signature.place(call.args, call.kwargs, call.context)
        if task.is_async:
            return await task.function(*args, **kwargs)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._thread_count, thread_name_prefix="taskmesh")
        run = contextvars.copy_context().run
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, functools.partial(run, _call_in_thread, task.function, *args, **kwargs)
        )

    def close(self) -> None:
        """Start no more threads; those that run are left to themselves."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def _call_in_thread(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    try:
        return function(*args, **kwargs)
    except (StopIteration, GeneratorExit) as error:
        # To the coroutine that awaits it they would mean something else.
        raise RuntimeError(f"the handler raised {type(error).__name__}") from error
