"""An application that faults of several servers are tried on, in this process; its ledger is outside Redis."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from taskmesh import Context, Handle, Mesh, Task
from tests.conftest import LIVENESS_TTL, settings_for_tests

QUEUES = ("red", "green", "blue")
Work = tuple[int, int]


class Application:
    """A submitter and workers over three queues.

    Attributes:
        runs: how often each queue's number was started.
        accepted: the handles of all that was accepted, by queue and number.
    """

    def __init__(self, url: str, name: str, workers: int = 2, ttl: float = LIVENESS_TTL) -> None:
        self.runs: Counter[tuple[str, int]] = Counter()
        self.accepted: dict[tuple[str, int], Handle[int]] = {}
        self._stack = AsyncExitStack()
        settings = settings_for_tests(url, liveness_ttl=ttl)
        self._workers = [Mesh(name, settings=settings) for _ in range(workers)]
        self.mesh = Mesh(name, settings=settings)
        for mesh in self._workers:
            self._tasks(mesh)
        self._own = dict(zip(QUEUES, self._tasks(self.mesh), strict=True))

    def _tasks(self, mesh: Mesh) -> list[Task[[int, float], int]]:
        async def work(ctx: Context, n: int, seconds: float) -> int:
            self.runs[ctx.queue, n] += 1
            await asyncio.sleep(seconds)
            return n

        return [mesh.task(name=f"work-{queue}", queue=queue)(work) for queue in QUEUES]

    async def submit(
        self, queue: str, n: int, seconds: float = 0.0, *, delay: float | None = None
    ) -> Handle[int]:
        """Submit one task, at once or after a delay; it is in the list of what was accepted."""
        task = self._own[queue]
        if delay is None:
            handle = await task.submit(n, seconds)
        else:
            handle = await task.submit_in(delay, n, seconds)
        self.accepted[queue, n] = handle
        return handle

    async def await_all(self, timeout: float = 20.0) -> None:
        """See that everything accepted has ended well, with its own result, each pushed once."""
        for (_, n), handle in self.accepted.items():
            assert await handle.result(timeout=timeout) == n
        assert self.mesh.client.repeats == 0

    async def seconds_to_submit(self, queue: str, n: int) -> float:
        """How long the next submit takes."""
        began = time.monotonic()
        await self.submit(queue, n)
        return time.monotonic() - began

    async def unsettled(self) -> int:
        """Messages in the streams and in the delayed sets."""
        count = 0
        for queue in QUEUES:
            partition = self.mesh.client.partition(queue)
            keys, command = partition.keys, partition.caller.command
            for lane in keys.lanes:
                count += await command(keys.tag, "XLEN", lane)
            count += await command(keys.tag, "ZCARD", keys.delayed)
        return count

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self.mesh)
        for mesh in self._workers:
            await self._stack.enter_async_context(mesh.worker())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
