"""Making a state of the run a version, and a version the state of the run.

Every step becomes a version. Most are there for the workers alone: parameters on the server without AOF, gone when
the next one is current. Every so often one is kept, with all that the run needs to go on from it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec

from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.checkpoints.store import Commit, VersionStore
from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.training.collect import Share
from taskmesh.training.compute import compute
from taskmesh.training.learner import Learner, pack_state, unpack_state
from taskmesh.training.rollback import LossHistory
from taskmesh.training.room import when_there_is_room
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: updates that the parameters have seen.
        drawn: batches that were drawn, skipped ones included: the number of the next one.
        skipped: batches that are left out.
    """

    step: int = 0
    drawn: int = 0
    skipped: tuple[int, ...] = ()
    losses: LossHistory = field(default_factory=LossHistory)


class LedgerEntry(msgspec.Struct, frozen=True):
    """What formed a version: the run's ledger has one for each commit, rollbacks included.

    Attributes:
        batch: the number of the batch, or of the first of several; -1 for a rollback.
        parent: the version that it was formed from; of a rollback, the one restored.
        shares: shard, worker, task and samples of each contribution.
    """

    version: int
    parent: int
    step: int
    batch: int
    samples: tuple[int, ...] = ()
    shares: tuple[Share, ...] = ()


_encode_entry = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(LedgerEntry).decode


def decode_entry(data: bytes) -> LedgerEntry:
    """Read an entry of the ledger.

    Raises:
        CheckpointError: the bytes are not one.
    """
    try:
        return _decode_entry(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"an entry of the ledger is damaged: {error}") from None


class Committer:
    """Writes a run's versions under the master's fencing token.

    Attributes:
        current: the manifest of the version that is current.
    """

    def __init__(self, setup: RunSetup, store: VersionStore, learner: Learner, token: int) -> None:
        self._setup = setup
        self._store = store
        self._learner = learner
        self._token = token
        self.current: Manifest | None = None
        self._version = 0  # of the newest commit, whoever made it

    @property
    def parameters(self) -> Part:
        """The current version's parameters, for the workers."""
        assert self.current is not None
        return self.current.parts["parameters"]

    @property
    def version(self) -> int:
        return self._version

    async def begin(self, samples: int) -> Progress:
        """Take a run up where its newest checkpoint is, or begin it.

        Raises:
            TrainingError: the run was begun with another seed, shards, batch size or compression, or other data.
            CheckpointError: there are checkpoints, and none is whole, or they are another model's.
        """
        await self._store.sweep(self._token)
        found = await self._store.load_newest()
        if found is None:
            progress = Progress()
            await self.commit(progress, metrics={}, kept=True, samples=samples)
            return progress
        manifest, parts = found
        progress = await self._restore(manifest, parts, samples)
        newest = await self._store.current()
        self._version = manifest.version if newest is None else max(manifest.version, newest.version)
        self.current = manifest
        if newest is not None and not newest.kept:
            await self._store.forget(newest.parts["parameters"])
        log.info("run %s goes on from version %d, step %d", self._setup.name, manifest.version, manifest.step)
        return progress

    async def commit(
        self,
        progress: Progress,
        metrics: Mapping[str, float],
        *,
        kept: bool,
        samples: int,
        entry: LedgerEntry | None = None,
    ) -> None:
        """Make the learner's parameters the next version.

        Args:
            samples: length of the data, which a resumed run is held against.

        Raises:
            LeadershipLost: another master leads the run.
            BrokerFull: the server has no room for it, for minutes.
        """
        version = self._version + 1 if self.current is not None else 0
        parts: dict[str, memoryview | bytes] = {"parameters": self._learner.flat.view()}
        if kept:
            state = {**self._learner.state(), **self._run_state(progress, samples)}
            parts["state"] = pack_state(state)
        described = await when_there_is_room(
            lambda: self._store.write(version, self._token, parts, kept=kept), f"run {self._setup.name}"
        )
        manifest = Manifest(
            version=version,
            parent=version if self.current is None else self.current.version,
            step=progress.step,
            batch=progress.drawn,
            token=self._token,
            kept=kept,
            layout=self._learner.flat.layout.digest,
            parts=described,
            metrics=metrics,
            skipped=progress.skipped,
        )
        await self._flip(manifest, b"" if entry is None else _encode_entry(entry))

    async def roll_back(
        self, target: Manifest, parts: Mapping[str, memoryview], skip: Sequence[int], samples: int
    ) -> Progress:
        """Make a checkpoint current again, as a new version that shares its chunks.

        Args:
            skip: batches to leave out from now on.
        """
        progress = await self._restore(target, parts, samples)
        skipped = {*self._skipped(target), *skip}
        progress = replace(progress, skipped=tuple(sorted(skipped)))
        manifest = replace(
            target,
            version=self._version + 1,
            parent=self._version,
            token=self._token,
            restored_from=target.version,
            skipped=progress.skipped,
        )
        entry = LedgerEntry(manifest.version, target.version, target.step, -1)
        await self._flip(manifest, _encode_entry(entry))
        return progress

    async def republish(self) -> Part:
        """Write the current parameters again: the server has lost them, or holds something else."""
        part, view = self.parameters, self._learner.flat.view()
        await when_there_is_room(
            lambda: self._store.rewrite(part, view, self._token), f"run {self._setup.name}"
        )
        return part

    async def end(self) -> None:
        """Leave nothing behind that is not kept."""
        if self.current is not None and not self.current.kept:
            await self._store.forget(self.parameters)

    async def _flip(self, manifest: Manifest, entry: bytes) -> None:
        dropped: list[Manifest] = []
        if manifest.kept:
            kept = [*(await self._store.kept()), manifest]
            stay = self._setup.checkpoint.retained(kept)
            dropped = [old for old in kept if old.version not in stay]
        await self._store.commit(Commit(manifest, dropped, entry), self._token)
        before, self.current, self._version = self.current, manifest, manifest.version
        if before is not None and not before.kept:
            await self._store.forget(before.parts["parameters"])

    def _skipped(self, target: Manifest) -> set[int]:
        """The batches left out so far: what was bad stays left out, whichever version the run goes back to."""
        return {*target.skipped, *(() if self.current is None else self.current.skipped)}

    def _run_state(self, progress: Progress, samples: int) -> dict[str, Any]:
        return {
            "seed": self._setup.seed,
            "samples": samples,
            "batch_size": self._setup.batch_size,
            "shards": self._setup.shards,
            "compression": self._setup.compression.name,
            "mode": self._setup.mode_name,
            "losses": asdict(progress.losses),
        }

    async def _restore(self, manifest: Manifest, parts: Mapping[str, memoryview], samples: int) -> Progress:
        if manifest.layout != self._learner.flat.layout.digest:
            raise CheckpointError(
                f"version {manifest.version} of run {self._setup.name!r} is another model's: "
                "give the run another name, or the same model"
            )
        state = unpack_state(parts["state"])
        wanted = self._run_state(Progress(), samples)
        for name in ("seed", "samples", "batch_size", "shards", "compression", "mode"):
            if state.get(name, wanted[name]) != wanted[name]:  # an older release did not note them all
                raise TrainingError(
                    f"run {self._setup.name!r} was begun with {name} {state.get(name)}, not {wanted[name]}: "
                    "give the run another name, or the same values"
                )
        await compute(self._learner.restore, parts["parameters"], state)
        losses = LossHistory.read(state["losses"]["first"], state["losses"]["recent"])
        return Progress(manifest.step, manifest.batch, manifest.skipped, losses)
