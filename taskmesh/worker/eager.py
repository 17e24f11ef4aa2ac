"""Starting a task at once: its first step runs before the call returns.

Python 3.12 has it built in (``eager_start``). Before that, the first step is run here under the new task's name, by
the means that asyncio documents for those who write tasks of their own ("Task lifetime support").
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")


def start_now(coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that has taken its first step; ``asyncio.current_task()`` was the new task in it."""
    loop = asyncio.get_running_loop()
    if sys.version_info >= (3, 12):
        return asyncio.Task(coroutine, loop=loop, eager_start=True)
    begun = _Begun(coroutine)
    task = loop.create_task(begun)
    current = asyncio.current_task()
    if current is not None:
        asyncio.tasks._leave_task(loop, current)
    asyncio.tasks._enter_task(loop, task)
    try:
        begun.begin()
    finally:
        asyncio.tasks._leave_task(loop, task)
        if current is not None:
            asyncio.tasks._enter_task(loop, current)
    return task


class _Begun(Coroutine[Any, Any, T]):
    """A coroutine whose first step may have been taken; what came of it is what the task's own first step gets."""

    __slots__ = ("_coroutine", "_ended", "_first")

    def __init__(self, coroutine: Coroutine[Any, Any, T]) -> None:
        self._coroutine = coroutine
        self._first: Any = None
        self._ended: BaseException | None = None

    def begin(self) -> None:
        try:
            self._first = self._coroutine.send(None)
        except BaseException as end:  # StopIteration among them: its task raises it again, and so ends
            self._ended = end

    def send(self, value: Any) -> Any:
        if self._ended is not None:
            raise self._ended
        first, self._first = self._first, None
        return self._coroutine.send(value) if first is None else first

    def throw(self, *error: Any) -> Any:
        if self._ended is not None:
            raise self._ended
        self._first = None
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, T]:
        raise TypeError("it is run by its task")
