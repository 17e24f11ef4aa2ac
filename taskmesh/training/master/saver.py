"""Checkpoints behind a run's back: copied aside at once, hashed and written while the next steps are taken.

What the workers remember for their shards they write themselves, likewise (``taskmesh.training.master.keeper``). At
most one checkpoint is on its way. One that is due by its step while another still is waits for it, and the run with it:
no server is so slow that checkpoints are left out. One that is due by the clock is put off instead.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import replace
from typing import Any

from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.mirror import Mirror
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import CheckpointError
from taskmesh.events import Checkpointed, MirrorFailed, Observers
from taskmesh.training.compute import enqueue
from taskmesh.training.master.keeper import Begun, Keeper
from taskmesh.training.memory import MemoryGone
from taskmesh.training.room import when_there_is_room
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.learner import Learner
from taskmesh.training.step.snapshot import Memory, Snapshot, take_snapshot

log = logging.getLogger("taskmesh.training")
STOP_PATIENCE = 30.0  # for the checkpoint on its way, when a run is stopped


class Saver:
    """Writes one run's checkpoints, and their mirror, for the holder of a fencing token.

    Attributes:
        newest: the newest that this master has completed, or has found whole; None before the first.
    """

    def __init__(
        self,
        setup: RunSetup,
        store: VersionStore,
        learner: Learner,
        token: int,
        observers: Observers,
        keeper: Keeper,
    ) -> None:
        keys, place = setup.keys, setup.checkpoint.mirror
        self._setup = setup
        self._store = store
        self._learner = learner
        self._token = token
        self._observers = observers
        self._memory = Memory()
        self._keeper = keeper
        self._collecting: asyncio.Task[Begun] | None = None
        self._blocked = 0.0  # seconds that the run waited for the workers
        self._saving: asyncio.Task[None] | None = None
        self.mirror = None if place is None else Mirror(place, keys.mesh, keys.run)
        self.newest: Manifest | None = None

    @property
    def is_saving(self) -> bool:
        return self._saving is not None and not self._saving.done()

    def check(self) -> None:
        """Raise what the last save has failed with, if it has."""
        if self._saving is not None and self._saving.done():
            self._saving.result()

    async def wait(self) -> None:
        """Return when no checkpoint is on its way. Raises what the last save has failed with."""
        if self._saving is not None:
            await asyncio.wait({self._saving})
        self.check()

    async def settle(self) -> None:
        """As ``wait``, for a run that goes back: what the version that it leaves remembered may be lost."""
        try:
            await self.wait()
        except MemoryGone:
            self._saving = self._collecting = None

    async def collected(self) -> None:
        """Return when the workers hold on to what they remember for the checkpoint on its way.

        Raises:
            MemoryGone: one of them is not there any more; there will be no such checkpoint.
        """
        if self._collecting is not None:
            began = self._now()
            await asyncio.wait({self._collecting})
            self._blocked += self._now() - began
            self._collecting.result()

    async def begin(
        self,
        version: Manifest,
        state: Mapping[str, Any],
        memories: Mapping[str, memoryview] | None = None,
        *,
        mirrored: bool = True,
    ) -> None:
        """Make the current version a checkpoint; returns when its copy is sure to be of this instant.

        The compute thread copies before it does anything else with the parameters.

        Args:
            state: what the next steps depend on beside the learner.
            memories: the parts with what compressions remember, where the workers do not have it.
            mirrored: whether it goes to the mirror too.
        """
        waited_from = self._now()
        await self.wait()
        began = self._now()
        copying = enqueue(self._copy, dict(state))
        seats = self._keeper.seats if memories is None else {}
        self._blocked = began - waited_from
        self._collecting = asyncio.create_task(
            self._keeper.begin(version.version, seats, self.newest), name="taskmesh memories"
        )
        self._start(self._save(version, copying, self._collecting, dict(memories or {}), began, mirrored))

    def mirror_copy(self, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
        """Let the mirror have a version whose parts are here. Not while a checkpoint is on its way."""
        self._start(self._write_mirror(manifest, parts))

    async def close(self) -> None:
        """The run ends, however it ends: let the checkpoint on its way be completed first.

        One that is not complete after STOP_PATIENCE seconds is given up. What a save fails with is logged.
        """
        saving = self._saving
        if saving is None or saving.done():
            return
        try:
            await asyncio.wait({saving}, timeout=STOP_PATIENCE)
        finally:
            if saving.cancel():
                log.error("run %s: a checkpoint was given up on the way", self._setup.name)
            await asyncio.wait({saving})

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        self._saving = asyncio.create_task(work, name="taskmesh checkpoint")
        self._saving.add_done_callback(self._tell)

    def _tell(self, saving: asyncio.Task[None]) -> None:
        error = None if saving.cancelled() else saving.exception()
        if error is not None and not isinstance(error, MemoryGone):
            log.error("run %s: a checkpoint failed: %s; those before it stay", self._setup.name, error)

    def _copy(self, state: dict[str, Any]) -> Snapshot:
        return take_snapshot(self._learner.flat, {**self._learner.state(), **state}, self._memory)

    async def _save(
        self,
        version: Manifest,
        copying: Awaitable[Snapshot],
        collecting: Awaitable[Begun],
        memories: dict[str, memoryview],
        began: float,
        mirrored: bool,
    ) -> None:
        snapshot = await copying
        written = await self._keeper.finish(await collecting)
        values = {**snapshot.parts, **memories}
        parts = await when_there_is_room(
            lambda: self._store.write_kept(version.version, self._token, values, self.newest, written),
            f"run {self._setup.name}",
        )
        kept = replace(version, kept=True, parts=parts)
        history = [*(await self._store.kept()), kept]
        stay = self._setup.checkpoint.retained(history)
        dropped = [old for old in history if old.version not in stay]
        await self._store.keep(kept, self._token, dropped, stands_for=version)
        self.newest = kept
        self._observers.emit(
            Checkpointed(
                self._setup.name,
                kept.version,
                kept.step,
                self._now() - began,
                kept.size_bytes,
                kept.written_bytes,
                self._blocked,
                snapshot.seconds,
            )
        )
        if mirrored:
            await self._write_mirror(kept, values)

    async def _write_mirror(self, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
        """The run goes on without its mirror: the checkpoint is safe where it belongs.

        Args:
            parts: those that are here; the others, which workers have written, are read.
        """
        if self.mirror is None:
            return
        try:
            others = {
                name: await self._store.load(part)
                for name, part in manifest.parts.items()
                if name not in parts
            }
            await asyncio.to_thread(self._write_and_prune, self.mirror, manifest, {**parts, **others})
        except CheckpointError as error:
            log.error("run %s: %s", self._setup.name, error)
            self._observers.emit(MirrorFailed(self._setup.name, manifest.version, str(error)))

    def _write_and_prune(self, mirror: Mirror, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
        mirror.write(manifest, parts)
        mirror.prune(self._setup.checkpoint.retained(mirror.versions()))

    def _now(self) -> float:
        return self._store.clock.monotonic()
