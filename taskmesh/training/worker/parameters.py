"""The parameters of versions in a worker: fetched once each, however many ask, into memory that is used again."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable

import numpy as np

from taskmesh.checkpoints.manifest import Part, is_whole
from taskmesh.training.host import Held, HostMemory

CACHED = 2  # versions: the one that is worked at, and the next
SPARE = 2  # buffers


class _Version:
    """One version, on its way or here."""

    __slots__ = ("fetch", "is_released", "users")

    def __init__(self, fetch: asyncio.Future[Held]) -> None:
        self.fetch = fetch
        self.users = 0
        self.is_released = False


class Versions:
    """Versions that are here. Memory is only written into again when nobody uses it.

    Args:
        load: brings a version's bytes into memory of its size; it is given what leads to the version, too.
        host: where other workers on this machine may have them already.
    """

    def __init__(
        self, load: Callable[[Part, Part | None, memoryview], Awaitable[object]], host: HostMemory
    ) -> None:
        self._load = load
        self._host = host
        self._versions: OrderedDict[Part, _Version] = OrderedDict()
        self._spare: list[memoryview] = []

    @contextlib.asynccontextmanager
    async def use(self, part: Part, update: Part | None = None) -> AsyncIterator[memoryview]:
        """A version's bytes, which stay what they are meanwhile.

        Args:
            update: what leads to it from the version before it, where its bytes do not travel.

        Raises:
            CheckpointError: they are gone, or damaged.
        """
        version = self._versions.get(part)
        if version is None or _has_failed(version.fetch):
            version = self._begin(part, update)
        version.users += 1
        try:
            yield (await asyncio.shield(version.fetch)).data
        finally:
            version.users -= 1
            if self._versions.get(part) is not version:
                self._retire(version)

    def _begin(self, part: Part, update: Part | None) -> _Version:
        replaced = self._versions.pop(part, None)
        version = self._versions[part] = _Version(asyncio.ensure_future(self._bring(part, update)))
        if replaced is not None:
            self._retire(replaced)
        while len(self._versions) > CACHED:
            self._retire(self._versions.popitem(last=False)[1])
        return version

    async def _bring(self, part: Part, update: Part | None) -> Held:
        fill = functools.partial(self._load, part, update)
        # Each process that follows takes every step itself: one that let another take some would be left behind.
        shared = await self._host.hold(
            part.root,
            part.size_bytes,
            fill if update is None else None,
            functools.partial(is_whole, part),
        )
        if shared is not None:
            return shared
        data = self._take(part.size_bytes)
        await fill(data)
        return Held(data, lambda: self._give(data))

    def _take(self, size: int) -> memoryview:
        for place, buffer in enumerate(self._spare):
            if len(buffer) == size:
                return self._spare.pop(place)
        return np.empty(size, np.uint8).data

    def _give(self, data: memoryview) -> None:
        if len(self._spare) < SPARE:
            self._spare.append(data)

    def _retire(self, version: _Version) -> None:
        """Let go of a version that is replaced, when it is here and its last user has left."""
        if not version.fetch.done():
            version.fetch.add_done_callback(lambda _: self._retire(version))
        elif not version.users and not version.is_released and not _has_failed(version.fetch):
            version.is_released = True
            version.fetch.result().release()


def _has_failed(fetch: asyncio.Future[Held]) -> bool:
    return fetch.done() and (fetch.cancelled() or fetch.exception() is not None)
