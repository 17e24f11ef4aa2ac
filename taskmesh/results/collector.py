"""Many handles, as they finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

from taskmesh.results.handle import Handle

R = TypeVar("R")


class Collector:
    """Collects the outcomes of handles that are added by and by."""

    def __init__(self) -> None:
        self._finished: asyncio.Queue[Handle[object]] = asyncio.Queue()
        self._waits: set[asyncio.Task[None]] = set()
        self.open = 0

    def add(self, handle: Handle[R]) -> None:
        """Wait for this one too."""
        self.open += 1
        wait = asyncio.create_task(self._wait(handle), name=f"taskmesh wait {handle.id}")
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)

    async def _wait(self, handle: Handle[R]) -> None:
        try:
            await handle.outcome()
        except Exception:
            pass
        self._finished.put_nowait(handle)  # type: ignore[arg-type]

    async def next(self) -> Handle[object]:
        """The next that finishes."""
        handle = await self._finished.get()
        self.open -= 1
        return handle

    def close(self) -> None:
        """Stop waiting; the tasks go on."""
        for wait in self._waits:
            wait.cancel()


async def as_completed(handles: Iterable[Handle[R]]) -> AsyncIterator[Handle[R]]:
    """The handles in the order in which their tasks end; ``await handle.result()`` returns at once then."""
    collector = Collector()
    try:
        for handle in handles:
            collector.add(handle)
        while collector.open:
            yield await collector.next()  # type: ignore[misc]
    finally:
        collector.close()
