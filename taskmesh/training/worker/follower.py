"""A worker that steps by what the master steps by: a copy of its optimizer, led from version to version."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from taskmesh.checkpoints.manifest import Manifest, Part, is_whole
from taskmesh.checkpoints.reading import VersionReader
from taskmesh.errors import CheckpointError, DecodeError
from taskmesh.training.compute import compute
from taskmesh.training.host import Held, HostMemory
from taskmesh.training.step.downlink import Step, decode
from taskmesh.training.step.learner import Learner
from taskmesh.training.step.snapshot import read_state

NEEDED = ("parameters", "tensors", "state", "index")  # of a checkpoint


class _Way:
    """How a version is reached.

    Attributes:
        base: the checkpoint that it begins at; None where the follower stands.
        steps: from there, the last one first.
    """

    def __init__(self) -> None:
        self.base: Manifest | None = None
        self.steps: list[Step] = []
        self._held: list[Held] = []

    def add(self, held: Held, step: Step) -> None:
        """One more step, before the others, which lies in memory that is held."""
        self._held.append(held)
        self.steps.append(step)

    def release(self) -> None:
        while self._held:
            self._held.pop().release()


class Follower:
    """Brings the parameters of versions, by the steps that led to them.

    One that comes late, or has missed too many of them, begins at a checkpoint. The workers of a machine share one
    fetch of each step; each takes it itself.

    Args:
        make: makes the learner that is led.
    """

    def __init__(self, make: Callable[[], Learner], host: HostMemory) -> None:
        self._make = make
        self._host = host
        self._learner: Learner | None = None
        self._version: int | None = None  # that the learner is at
        self._following = asyncio.Lock()

    async def bring(self, store: VersionReader, part: Part, update: Part, into: memoryview) -> None:
        """Write a version's parameters into memory of their size.

        Args:
            update: what leads to it.

        Raises:
            CheckpointError: steps on the way are gone, and no checkpoint leads there; or this process's optimizer
                leads elsewhere.
        """
        async with self._following:
            way = _Way()
            try:
                await self._find_way(way, store, part.version, update)
                self._version = None  # should this fail on the way
                base: dict[str, memoryview] = {}
                if way.base is not None:
                    kept = way.base.parts
                    base = {name: await store.load(kept[name]) for name in NEEDED if name in kept}
                await compute(self._go, base, way.steps, into)
            finally:
                way.release()
            if not is_whole(part, into):
                raise CheckpointError(
                    f"run {store.keys.run!r}: the steps to version {part.version} lead elsewhere in this process; its "
                    "optimizer computes other bits than the master's"
                )
            self._version = part.version

    async def _find_way(self, way: _Way, store: VersionReader, version: int, update: Part) -> None:
        """From where the follower stands, if that leads there; else from the newest checkpoint that does."""
        if self._version is not None and version < self._version:
            self._version = None  # it was another run of that name, or the order is late
        kept = {} if self._version is not None else await _checkpoints(store)
        at: int = version
        link: Part | None = update
        while at != self._version and at not in kept and link is not None:
            if self._version is not None and at < self._version:
                break  # the run went back to before what was seen here
            try:
                held = await self._fetch(store, link)
                way.add(held, decode(held.data))
            except (CheckpointError, DecodeError):
                break
            at, link = way.steps[-1].parent, way.steps[-1].previous
        if at == self._version:
            return
        kept = kept or await _checkpoints(store)
        for place, passed in enumerate((version, *(step.parent for step in way.steps))):
            if passed in kept:
                way.base = kept[passed]
                del way.steps[place:]
                return
        raise CheckpointError(f"run {store.keys.run!r}: no checkpoint leads to version {version} (any more)")

    async def _fetch(self, store: VersionReader, update: Part) -> Held:
        """A step, in memory that this machine's workers share where there is room."""
        size = update.size_bytes

        async def fill(into: memoryview) -> None:
            await store.load(update, into[:size])

        shared = await self._host.hold(
            update.root, _room_for(size), fill, lambda data: is_whole(update, data[:size])
        )
        if shared is None:
            return Held(await store.load(update), lambda: None)
        return Held(shared.data[:size], shared.release)

    def _go(self, base: Mapping[str, memoryview], steps: Sequence[Step], into: memoryview) -> None:
        if self._learner is None:
            self._learner = self._make()
        if base:
            self._learner.restore(base["parameters"], read_state(base))
        for step in reversed(steps):
            try:
                self._learner.follow(step)
            except DecodeError as error:
                raise CheckpointError(str(error)) from None
        np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(self._learner.flat.view(), np.uint8))


def _room_for(size: int) -> int:
    """So many bytes or up to an eighth more: steps differ a little, and shared files are of few sizes."""
    grain = 1 << max(0, size.bit_length() - 4)
    return -(-size // grain) * grain


async def _checkpoints(store: VersionReader) -> dict[int, Manifest]:
    return {manifest.version: manifest for manifest in await store.kept()}
