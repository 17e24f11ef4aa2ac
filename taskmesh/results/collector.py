"""Many handles, as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from typing import Generic, TypeVar

from taskmesh.results.handle import Handle

R = TypeVar("R")


class Collector(Generic[R]):
    """Collects the outcomes of handles that are added by and by."""

    def __init__(self) -> None:
        self._finished: asyncio.Queue[Handle[R]] = asyncio.Queue()
        self._open: dict[int, Callable[[], None]] = {}

    @property
    def open(self) -> int:
        """Handles that were added and not returned yet."""
        return len(self._open)

    def add(self, handle: Handle[R]) -> None:
        """Wait for this one too."""
        self._open[id(handle)] = handle.watch(self._finished.put_nowait)

    async def next(self) -> Handle[R]:
        """The next that finishes."""
        handle = await self._finished.get()
        del self._open[id(handle)]
        return handle

    def close(self) -> None:
        """Stop waiting; the tasks go on."""
        for call_off in self._open.values():
            call_off()
        self._open.clear()


async def as_completed(handles: Iterable[Handle[R]]) -> AsyncIterator[Handle[R]]:
    """The handles in the order in which their tasks end; ``await handle.result()`` returns at once then."""
    collector: Collector[R] = Collector()
    try:
        for handle in handles:
            collector.add(handle)
        while collector.open:
            yield await collector.next()
    finally:
        collector.close()
