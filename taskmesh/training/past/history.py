"""Looking back at a run: its versions formed again, formed without somebody, and searched for where they turned bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.store import LEDGER_ENTRIES, VersionStore
from taskmesh.checkpoints.tables import memories_of
from taskmesh.errors import CheckpointError, ConfigurationError
from taskmesh.training.compute import compute
from taskmesh.training.ledger import LedgerEntry, decode_entry
from taskmesh.training.past.bases import check_bases
from taskmesh.training.past.replay import Replay, check_memories, choose_start, lineage, way_between
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.learner import Learner
from taskmesh.training.step.progress import Point, restore
from taskmesh.training.worker.replica import Recipe


class Replayed(NamedTuple):
    """A version that was formed again.

    Attributes:
        digest: of its parameters.
        matches: whether it is what the run committed, by its ledger and, where it is kept, by its checkpoint; None
            where neither says.
    """

    version: int
    step: int
    digest: str
    matches: bool | None


class Formed(NamedTuple):
    """A version formed again without one worker's contributions.

    Attributes:
        since: the checkpoint from which they were left out.
        left_out: how many there were.
        version: as which it was committed; None where it was not.
    """

    model: nn.Module
    step: int
    digest: str
    since: int
    left_out: int
    version: int | None = None


class Turned(NamedTuple):
    """Where a run turned bad.

    Attributes:
        version, step: the first that is bad.
        entry: what formed it.
        evaluations: how many models were judged.
    """

    version: int
    step: int
    entry: LedgerEntry
    evaluations: int


class _Way(NamedTuple):
    """From a checkpoint to a version.

    Attributes:
        start: where the replay begins: the checkpoint, or one before it.
        lead: what leads from there to the checkpoint, in an asynchronous run.
    """

    start: Manifest
    lead: Sequence[LedgerEntry]
    entries: Sequence[LedgerEntry]

    @property
    def first(self) -> int:
        """The checkpoint's version."""
        return self.entries[0].parent


class History:
    """One run's past.

    Args:
        build: makes a model of parameters.
    """

    def __init__(
        self,
        setup: RunSetup,
        recipe: Recipe,
        store: VersionStore,
        learner: Learner,
        build: Callable[[memoryview], nn.Module],
    ) -> None:
        self._setup = setup
        self._store = store
        self._learner = learner
        self._build = build
        self._replay = Replay(setup, recipe, learner)

    async def replay(self, first: int | None, last: int | None) -> list[Replayed]:
        """Form the versions after ``first`` again, up to ``last``."""
        way = await self._way(first, last)
        there = {manifest.version: manifest for manifest in await self._store.kept()}
        current = await self._store.current()
        if current is not None:
            there.setdefault(current.version, current)
        await self._start(way)
        found: list[Replayed] = []
        for entry in way.entries:
            await compute(self._replay.advance, entry)
            found.append(await compute(self._compare, entry, there.get(entry.version)))
        return found

    def _compare(self, entry: LedgerEntry, manifest: Manifest | None) -> Replayed:
        digest = self._replay.digest()
        committed = [(False, entry.digest.hex())] if entry.digest else []
        if manifest is not None:
            part = manifest.parts["parameters"]
            committed.append((part.kept, part.root.hex()))
        matches = [self._replay.digest(kept=kept) == wanted for kept, wanted in committed]
        return Replayed(entry.version, entry.step, digest, all(matches) if matches else None)

    async def form(self, version: int | None, without: str, since: int | None) -> tuple[Formed, Point]:
        """Form a version again without a worker's contributions since a checkpoint.

        Raises:
            ConfigurationError: the worker contributed nothing since then.
        """
        way = await self._way(since, version)
        workers = {share.worker for entry in way.entries for share in entry.shares}
        if without not in workers:
            raise ConfigurationError(
                f"worker {without!r} contributed nothing since version {way.first}; those that did are "
                f"{', '.join(sorted(workers)) or 'none'}"
            )
        await self._start(way)
        left_out = 0
        for entry in way.entries:
            left_out += await compute(self._replay.advance, entry, without)
        point = await compute(self._replay.point)
        digest = await compute(self._replay.digest)
        model = await compute(self._build, point.parameters)
        return Formed(model, point.progress.step, digest, way.first, left_out), point

    async def bisect(self, is_bad: Callable[[nn.Module], bool], good: int | None, bad: int | None) -> Turned:
        """Find the first bad version on the way from a good one to a bad one.

        Raises:
            ConfigurationError: the good one is bad, or the bad one good.
        """
        way = await self._way(good, bad)
        kept = {manifest.version: manifest for manifest in await self._store.kept()}
        search = _Search(self._replay, way.entries)
        evaluations = 0

        async def judge(place: int) -> bool:
            nonlocal evaluations
            await self._reach(search, place, kept)
            evaluations += 1
            return await compute(_judge, is_bad, self._build, self._replay.parameters)

        await self._start(way)
        if await judge(0):
            raise ConfigurationError(f"version {way.first}, where the search begins, is bad already")
        await search.note_good()
        low, high = 0, len(way.entries)
        if not await judge(high):
            raise ConfigurationError(f"version {way.entries[-1].version}, where the search ends, is not bad")
        while high - low > 1:
            middle = (low + high) // 2
            if await judge(middle):
                high = middle
            else:
                low = middle
                await search.note_good()
        turned = way.entries[high - 1]
        return Turned(turned.version, turned.step, turned, evaluations)

    async def _reach(self, search: _Search, place: int, kept: dict[int, Manifest]) -> None:
        """Take the replay to a place on the way, from the nearest state before it that there is."""
        await search.go_before(place)
        for nearer in range(place, search.place, -1):
            manifest = kept.get(search.entries[nearer - 1].version)
            if manifest is not None and self._has_all(manifest):
                await self._begin(manifest)
                search.place = nearer
                break
        await search.advance_to(place)

    async def _way(self, first: int | None, last: int | None) -> _Way:
        """How a version was formed, from a checkpoint: by default the oldest from which that can be told.

        Raises:
            CheckpointError: there is no such checkpoint or version, or the ledger lacks what led from one to the other.
        """
        last = (await self._store.find()).version if last is None else last
        entries = [decode_entry(data) for data in await self._store.ledger(2 * LEDGER_ENTRIES)]
        found = [entry for entry in entries if entry.version == last]
        if not found:
            raise CheckpointError(f"run {self._setup.name!r}: the ledger has no entry of version {last}")
        if found[0].without:
            raise CheckpointError(
                f"run {self._setup.name!r}: version {last} was formed again without worker {found[0].without}: it is "
                "where a replay can begin, not where it can lead"
            )
        if first == last:
            raise ConfigurationError(f"from version {first} to version {last} there is nothing to form")
        way = lineage(entries, last)
        kept = {manifest.version: manifest for manifest in await self._store.kept()}

        def check(begins: int, entries: Sequence[LedgerEntry]) -> None:
            if self._replay.remembers:
                check_memories(entries, memories_of(kept[begins].parts))
            if self._setup.is_asynchronous:
                check_bases(entries)

        if first is None:
            first = choose_start(way, last, kept, check)
        kept[first] = await self._store.find_kept(first)
        chosen = way_between(way, first, last)
        if not self._setup.is_asynchronous:
            check(first, chosen)
            return _Way(kept[first], (), chosen)
        # Gradients may be of versions before the checkpoint.
        start = choose_start(way, last, {version for version in kept if version <= first}, check)
        return _Way(kept[start], way_between(way, start, last)[: -len(chosen)], chosen)

    def _has_all(self, checkpoint: Manifest) -> bool:
        """Whether a replay can begin there: an older release did not keep what compressions remember.

        What was under way in an asynchronous run is of versions that no checkpoint has.
        """
        if self._setup.is_asynchronous:
            return False
        return not self._replay.remembers or bool(memories_of(checkpoint.parts))

    async def _start(self, way: _Way) -> None:
        """Stand at the way's first version."""
        await self._begin(way.start)
        for entry in way.lead:
            await compute(self._replay.advance, entry)

    async def _begin(self, manifest: Manifest) -> None:
        parts = {name: await self._store.load(part) for name, part in manifest.parts.items()}
        progress = await restore(self._setup, self._learner, manifest, parts, self._setup.samples)
        await compute(self._replay.begin, progress, manifest.version, parts)


class _Search:
    """Where a replay stands on its way, and the last place known to be good, to come back to.

    Attributes:
        place: so many entries have been taken.
    """

    def __init__(self, replay: Replay, entries: Sequence[LedgerEntry]) -> None:
        self.entries = entries
        self.place = 0
        self._replay = replay
        self._good: tuple[int, Point] | None = None

    async def note_good(self) -> None:
        self._good = self.place, await compute(self._replay.point)

    async def go_before(self, place: int) -> None:
        """Stand at or before a place."""
        if self.place > place:
            assert self._good is not None
            self.place, point = self._good
            await compute(self._replay.go_back, point)

    async def advance_to(self, place: int) -> None:
        while self.place < place:
            await compute(self._replay.advance, self.entries[self.place])
            self.place += 1


def _judge(
    is_bad: Callable[[nn.Module], bool], build: Callable[[memoryview], nn.Module], parameters: memoryview
) -> bool:
    with torch.no_grad():
        return bool(is_bad(build(parameters).eval()))
