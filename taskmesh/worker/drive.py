"""Running a handler's coroutine inside the task that found it, in a context of its own.

A handler that never suspends costs no asyncio.Task: its runner goes on with the next message. One that does
suspend keeps the runner's task to itself from then on.
"""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


@types.coroutine
def drive(coroutine: Coroutine[Any, Any, T], on_suspend: Callable[[], None]) -> Generator[Any, Any, T]:
    """Run ``coroutine`` to its end in a fresh context; ``on_suspend`` is called when it first suspends."""
    run = contextvars.Context().run
    send = coroutine.send
    try:
        yielded = run(send, None)
        on_suspend()
        while True:
            try:
                value = yield yielded
            except GeneratorExit as closed:  # the loop is gone, and with it whoever could act on an ending
                run(coroutine.close)
                raise LoopGone from closed
            except BaseException as error:
                yielded = run(coroutine.throw, error)
            else:
                yielded = run(send, value)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except GeneratorExit as error:
        raise RuntimeError("the handler raised GeneratorExit") from error


class LoopGone(BaseException):
    """The event loop was closed under a handler."""
