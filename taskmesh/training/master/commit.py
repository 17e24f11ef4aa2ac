"""Making a state of the run a version, and a version the state of the run.

Every step becomes a version, there for the workers: parameters on the server without AOF, gone when the next one is
current. Every so often one is kept, with all that the run needs to go on from it; that takes its time
(``taskmesh.training.master.saver``), and the steps do not wait for it. The first version is kept before the first step,
the last before the run ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.checkpoints.store import Commit, VersionStore
from taskmesh.checkpoints.tables import memories_of, memory_name
from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.events import Observers, Resumed
from taskmesh.training.ledger import LedgerEntry, encode_entry
from taskmesh.training.master.keeper import Keeper
from taskmesh.training.master.published import Published
from taskmesh.training.master.saver import Saver
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.learner import Learner
from taskmesh.training.step.progress import Progress, restore, run_state

log = logging.getLogger("taskmesh.training")
Loaded = tuple[Manifest, dict[str, memoryview]]


class Committer:
    """Writes a run's versions under the master's fencing token, and has some of them kept.

    Attributes:
        current: the manifest of the version that is current.
        published: what lies there for the workers.
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
        self._setup = setup
        self._store = store
        self._learner = learner
        self._token = token
        self._observers = observers
        self.published = Published(store, learner, token)
        self._saver = Saver(setup, store, learner, token, observers, keeper)
        self.current: Manifest | None = None
        self._version = 0  # of the newest commit, whoever made it
        self._state: dict[str, Any] = {}  # what the current version's successors depend on beside the learner
        self._due_at = store.clock.monotonic()
        self._keeping = asyncio.Lock()
        self._fingerprint = setup.fingerprint  # of the machines whose steps led to the current version

    @property
    def parameters(self) -> Part:
        """The current version's parameters, for the workers."""
        assert self.current is not None
        return self.current.parts["parameters"]

    @property
    def update(self) -> Part | None:
        """What leads to the current version's parameters, where they do not travel themselves."""
        assert self.current is not None
        return self.current.parts.get("update")

    @property
    def version(self) -> int:
        return self._version

    @property
    def checkpoint(self) -> Manifest:
        """The newest that is complete."""
        assert self._saver.newest is not None
        return self._saver.newest

    async def begin(self, samples: int) -> Progress:
        """Take a run up where its newest checkpoint is, or begin it with one.

        Raises:
            TrainingError: the run was begun with another seed, shards, batch size or compression, or other data.
            CheckpointError: there are checkpoints, and none is whole, or they are another model's.
        """
        await self._store.sweep(self._token)
        newest = await self._store.current()
        if newest is not None:
            self._version = newest.version
            if not newest.kept:
                await self._store.forget(newest.parts.get("update", newest.parts["parameters"]))
        found, mirrored = await self._find()
        if found is None:
            return await self._begin_anew(mirrored, 0 if newest is None else newest.version + 1, samples)
        manifest, parts = found
        progress = await self._restore(manifest, parts, samples)
        self._version = max(manifest.version, self._version)
        self.current = self._saver.newest = manifest
        self._fingerprint = manifest.fingerprint or self._fingerprint
        log.info("run %s goes on from version %d, step %d", self._setup.name, manifest.version, manifest.step)
        self._observers.emit(Resumed(self._setup.name, manifest.version, manifest.step))
        return progress

    def hold_fingerprint(self) -> None:
        """See that steps taken here have the bits that they would have had where the run was begun.

        Raises:
            TrainingError: they would not.
        """
        begun, here = self._fingerprint, self._setup.fingerprint
        if begun and here and begun != here:
            raise TrainingError(
                f"run {self._setup.name!r} was computed with {begun}; this master has {here}, so its bits would "
                "be others: let it run where it did, or give the Trainer deterministic=False to go on with other bits"
            )
        self._fingerprint = here

    async def _find(self) -> tuple[Loaded | None, Loaded | None]:
        """The newest checkpoint that is whole; where there is none, the newest of the mirror.

        Raises:
            CheckpointError: there are checkpoints, and none is whole, and there is none on the mirror.
        """
        mirror = self._saver.mirror
        try:
            found = await self._store.load_newest()
        except CheckpointError:
            mirrored = None if mirror is None else await asyncio.to_thread(mirror.load_newest)
            if mirrored is None:
                raise
            return None, mirrored
        if found is not None or mirror is None:
            return found, None
        return None, await asyncio.to_thread(mirror.load_newest)

    async def _begin_anew(self, mirrored: Loaded | None, version: int, samples: int) -> Progress:
        """There is no checkpoint: begin, with what the mirror has if it has any.

        Args:
            version: above the newest there was, should a master have died before its first checkpoint was complete.
        """
        progress, metrics = Progress(), {}
        memories: dict[str, memoryview] = {}
        if mirrored is not None:
            manifest, parts = mirrored
            progress = await self._restore(manifest, parts, samples)
            self._fingerprint = manifest.fingerprint or self._fingerprint
            metrics, version = dict(manifest.metrics), max(version, await self._number_of(manifest))
            memories = {memory_name(shard): value for shard, value in memories_of(parts).items()}
            log.warning(
                "run %s: its server has no whole checkpoint of it; it goes on from version %d, step %d, of %r",
                self._setup.name,
                manifest.version,
                progress.step,
                self._saver.mirror,
            )
            self._observers.emit(Resumed(self._setup.name, manifest.version, progress.step))
        await self._commit(version, progress, metrics, samples, None)
        await self._keep(memories, mirrored=mirrored is None or version != mirrored[0].version)
        await self._saver.wait()
        return progress

    async def _number_of(self, mirrored: Manifest) -> int:
        """Its own if it is the mirror's newest, else one above that: what is damaged must not count as newer."""
        assert self._saver.mirror is not None
        newest = (await asyncio.to_thread(self._saver.mirror.versions))[-1].version
        return newest if newest == mirrored.version else newest + 1

    async def commit(
        self, progress: Progress, metrics: Mapping[str, float], samples: int, entry: LedgerEntry
    ) -> None:
        """Make the learner's parameters the next version; it becomes a checkpoint by and by where one is due.

        Args:
            samples: length of the data, which a resumed run is held against.

        Raises:
            LeadershipLost: another master leads the run.
            BrokerFull: the server has no room for it, for minutes.
            MemoryGone: what a checkpoint on its way needs of a worker is lost; nothing is committed.
            and what an earlier checkpoint has failed with.
        """
        self._saver.check()
        await self._saver.collected()
        await self._commit(self._version + 1, progress, metrics, samples, entry)
        now = self._store.clock.monotonic()
        elapsed = 0.0 if self._saver.is_saving else now - self._due_at
        if self._setup.checkpoint.is_due(progress.step, elapsed):
            self._due_at = now
            await self._keep()

    async def _commit(
        self,
        version: int,
        progress: Progress,
        metrics: Mapping[str, float],
        samples: int,
        entry: LedgerEntry | None,
    ) -> None:
        parts = await self.published.write(version, progress.step, self.current)
        manifest = Manifest(
            version=version,
            parent=version if self.current is None else self.current.version,
            step=progress.step,
            batch=progress.drawn,
            token=self._token,
            kept=False,
            layout=self._learner.flat.layout.digest,
            parts=parts,
            metrics=metrics,
            skipped=progress.skipped,
            at_ms=_now_ms(),
            fingerprint=self._fingerprint,
        )
        digest = parts["parameters"].root
        ledger = b"" if entry is None else encode_entry(msgspec.structs.replace(entry, digest=digest))
        await self._flip(Commit(manifest, ledger=ledger))
        self._state = run_state(self._setup, progress, samples)

    async def adopt(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        samples: int,
        entry: LedgerEntry,
        memories: Mapping[str, memoryview],
    ) -> None:
        """Make the learner's parameters, which were formed without workers, the next version, and a checkpoint.

        Args:
            memories: the parts with what compressions remember.

        Raises:
            as ``commit``.
        """
        await self._commit(self._version + 1, progress, metrics, samples, entry)
        await self._keep(memories)
        await self._saver.wait()

    async def _keep(self, memories: Mapping[str, memoryview] | None = None, *, mirrored: bool = True) -> None:
        """Have the current version kept, as it is now."""
        assert self.current is not None
        await self._saver.begin(self.current, self._state, memories, mirrored=mirrored)

    async def newest_kept(self) -> Loaded | None:
        """The newest checkpoint, also when it was still on its way; None where there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged; or what one has failed with.
        """
        await self._saver.settle()
        return await self._store.load_newest()

    async def load_kept(self, version: int) -> Loaded:
        """One checkpoint, also when it was still on its way.

        Raises:
            CheckpointError: it is not kept (any more), or damaged; or what one has failed with.
        """
        await self._saver.settle()
        target = await self._store.find_kept(version)
        return target, {name: await self._store.load(part) for name, part in target.parts.items()}

    async def kept(self) -> list[Manifest]:
        """The checkpoints, oldest first, the one that was on its way among them.

        Raises:
            CheckpointError: what one has failed with.
        """
        await self._saver.wait()
        return await self._store.kept()

    async def roll_back(
        self, target: Manifest, parts: Mapping[str, memoryview], skip: Sequence[int], samples: int
    ) -> Progress:
        """Make a checkpoint current again, as a new version that shares its chunks.

        Args:
            skip: batches to leave out from now on.
        """
        await self._saver.settle()
        progress = await self._restore(target, parts, samples)
        progress = progress.leave_out({*self._skipped(target), *skip})
        manifest = replace(
            target,
            version=self._version + 1,
            parent=self._version,
            token=self._token,
            restored_from=target.version,
            skipped=progress.skipped,
            at_ms=_now_ms(),
        )
        entry = LedgerEntry(manifest.version, target.version, target.step, -1)
        kept = [*(await self._store.kept()), manifest]
        stay = self._setup.checkpoint.retained(kept)
        dropped = [old for old in kept if old.version not in stay]
        await self._flip(Commit(manifest, dropped, encode_entry(entry)))
        self._saver.newest = manifest
        if self._saver.mirror is not None:
            self._saver.mirror_copy(manifest, parts)
        return progress

    async def republish(self) -> Part:
        """Let the current parameters be had again: the server has lost them, or holds something else.

        Where only steps travel, that is by a checkpoint, from which workers may begin.
        """
        if self.update is not None:
            return (await self._keep_current()).parts["parameters"]
        await self.published.write_again(self.parameters)
        return self.parameters

    async def end(self) -> Manifest:
        """Keep the current version, whether it is due or not, and leave nothing behind that is not kept.

        Raises:
            MemoryGone: what it needs of a worker is lost.
            and what a checkpoint has failed with.
        """
        await self._saver.wait()
        assert self.current is not None
        if not self.current.kept:
            before, self.current = self.current, await self._keep_current()
            await self.published.let_go(before, self.current, self._saver.newest)
        return self.current

    async def _keep_current(self) -> Manifest:
        """The current version as a checkpoint, which it may be already."""
        async with self._keeping:
            await self._saver.wait()
            assert self.current is not None
            if self._saver.newest is None or self._saver.newest.version != self.current.version:
                await self._keep()
                await self._saver.wait()
            assert self._saver.newest is not None
            return self._saver.newest

    async def close(self) -> None:
        """The run ends, however it ends: a checkpoint on its way is completed first, within half a minute."""
        await self._saver.close()

    async def _flip(self, commit: Commit) -> None:
        await self._store.commit(commit, self._token)
        before, current = self.current, commit.manifest
        self.current, self._version = current, current.version
        if before is not None and not before.kept:
            await self.published.let_go(before, current, self._saver.newest)

    def _skipped(self, target: Manifest) -> set[int]:
        """The batches left out so far: what was bad stays left out, whichever version the run goes back to."""
        return {*target.skipped, *(() if self.current is None else self.current.skipped)}

    async def _restore(self, manifest: Manifest, parts: Mapping[str, memoryview], samples: int) -> Progress:
        return await restore(self._setup, self._learner, manifest, parts, samples)


def _now_ms() -> int:
    return int(time.time() * 1000)
