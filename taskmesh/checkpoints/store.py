"""A run's versions in Redis.

Chunks are written first, then one script in the run's slot makes the version current; until then nobody sees it.
Chunks that no manifest needs are noted as garbage in that same step (those of a kept version even before they are
written), then unlinked, then the note is struck out: a master that dies anywhere on the way leaves a note for the
next one's ``sweep``. Versions that are not kept lie on the server without AOF, with a time to live besides.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from taskmesh.broker import chunks, scripts
from taskmesh.broker.caller import Caller
from taskmesh.broker.link import Argument
from taskmesh.checkpoints import manifest as manifests
from taskmesh.checkpoints.manifest import Manifest, Part, checksum_of, digest_of
from taskmesh.errors import CheckpointError, LeadershipLost
from taskmesh.keys import RunKeys

log = logging.getLogger("taskmesh.checkpoints")
TRANSIENT_TTL_MS = 3_600_000
LEDGER_ENTRIES = 10_000
_SMALL_BYTES = 64 * 1024  # hashed where they are; larger chunks in a thread


class Commit(NamedTuple):
    """A version that is ready to become current.

    Attributes:
        dropped: kept versions that leave the history with it.
        ledger: what the run's ledger says of it; empty for nothing.
    """

    manifest: Manifest
    dropped: Sequence[Manifest] = ()
    ledger: bytes = b""


class VersionStore:
    """Reads a run's versions, and writes them for the holder of a fencing token."""

    def __init__(self, caller: Caller, bulk: Caller, keys: RunKeys) -> None:
        self._caller = caller
        self._bulk = bulk
        self.keys = keys

    # reading

    async def current(self) -> Manifest | None:
        """The newest version, kept or not; None before the first."""
        data = await self._ask("GET", self.keys.current)
        return None if data is None else manifests.decode(data)

    async def kept(self) -> list[Manifest]:
        """The checkpoints, oldest first."""
        flat = await self._ask("HVALS", self.keys.history)
        return sorted((manifests.decode(data) for data in flat), key=lambda manifest: manifest.version)

    async def find_kept(self, version: int) -> Manifest:
        """One checkpoint's manifest.

        Raises:
            CheckpointError: it is not kept (any more).
        """
        data = await self._ask("HGET", self.keys.history, version)
        if data is None:
            raise CheckpointError(f"run {self.keys.run!r} keeps no version {version} (any more)")
        return manifests.decode(data)

    async def find(self, version: int | None = None) -> Manifest:
        """The manifest of a checkpoint, or of the current version.

        Raises:
            CheckpointError: there is none.
        """
        current = await self.current()
        if current is None:
            raise CheckpointError(f"run {self.keys.run!r} has no version yet")
        if version is None or current.version == version:
            return current
        return await self.find_kept(version)

    async def load(self, part: Part, into: memoryview | None = None) -> memoryview:
        """A part's bytes, each chunk held against its digest.

        Args:
            into: memory of the part's size for them; else it is their own.

        Raises:
            CheckpointError: a chunk is gone or is not what was written.
        """
        value = memoryview(bytearray(part.size_bytes)) if into is None else into
        if len(value) != part.size_bytes or len(part.digests) != len(chunks.split(value)):
            raise CheckpointError(
                f"run {self.keys.run!r}: version {part.version} has {part.size_bytes} bytes in {len(part.digests)} "
                f"chunks; {len(value)} bytes are wanted"
            )
        pieces = chunks.split(value)
        faults = dict.fromkeys(range(len(pieces)), "gone")
        digest = digest_of if part.kept else checksum_of

        def target(place: int, size: int) -> memoryview | None:
            faults[place] = "corrupt"
            return pieces[place] if size == len(pieces[place]) else None

        def check(place: int) -> None:
            if digest(pieces[place]) == part.digests[place]:
                faults.pop(place, None)

        await chunks.get(self._home(part.kept), part.keys(self.keys), target, check, part.size_bytes)
        for place, fault in faults.items():
            raise CheckpointError(
                f"run {self.keys.run!r}: chunk {place} of version {part.version} is {fault}"
            )
        return value

    async def load_newest(self) -> tuple[Manifest, dict[str, memoryview]] | None:
        """The newest checkpoint that is complete, with all its parts; None where there is none at all.

        Raises:
            CheckpointError: there are checkpoints, and all are damaged.
        """
        kept = await self.kept()
        for manifest in reversed(kept):
            try:
                return manifest, {name: await self.load(part) for name, part in manifest.parts.items()}
            except CheckpointError as error:
                log.error("%s; looking for an older version", error)
        if kept:
            raise CheckpointError(f"run {self.keys.run!r}: none of its {len(kept)} checkpoints is whole")
        return None

    async def load_parameters(self, version: int | None = None) -> tuple[Manifest, memoryview]:
        """The parameters of a version, by default the current one.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        if version is not None:
            manifest = await self.find(version)
            return manifest, await self.load(manifest.parts["parameters"])
        last: CheckpointError | None = None
        for _ in range(3):  # a version that is not kept may give way to the next one under the reader's eyes
            current = await self.current()
            if current is None:
                break
            try:
                return current, await self.load(current.parts["parameters"])
            except CheckpointError as error:
                last = error
        newest = await self.load_newest()
        if newest is None:
            raise last or CheckpointError(f"run {self.keys.run!r} has no version yet")
        return newest[0], newest[1]["parameters"]

    # writing

    async def write(
        self, version: int, token: int, parts: Mapping[str, memoryview | bytes], *, kept: bool
    ) -> dict[str, Part]:
        """Write a version's chunks; it becomes visible with ``commit``.

        Raises:
            LeadershipLost: the token is not the newest.
            BrokerFull: the server has no room; what was written is removed later.
        """
        described: dict[str, Part] = {}
        pieces: list[memoryview] = []
        for name, value in parts.items():
            cut = chunks.split(memoryview(value))
            described[name] = Part(
                kept, version, token, len(pieces), sum(map(len, cut)), tuple(await _digests(kept, cut))
            )
            pieces += cut
        keys = [key for part in described.values() for key in part.keys(self.keys)]
        await self._put(keys, pieces, kept, _note(version, token), token)
        return described

    async def rewrite(self, part: Part, value: memoryview, token: int) -> None:
        """Write again the chunks of a part that were lost or damaged.

        Args:
            value: what they held.

        Raises:
            CheckpointError: it is not what they held.
            LeadershipLost, BrokerFull: as ``write``.
        """
        pieces = chunks.split(value)
        if tuple(await _digests(part.kept, pieces)) != part.digests:
            raise CheckpointError(f"run {self.keys.run!r}: this is not what version {part.version} held")
        await self._put(part.keys(self.keys), pieces, part.kept, f"{part.version}:{token}:again", token)

    async def _put(
        self, keys: list[bytes], pieces: Sequence[memoryview], kept: bool, note: str, token: int
    ) -> None:
        """Write chunks; those that stay are noted first, as garbage unless a checkpoint needs them by then."""
        if kept:
            reserved = await self._caller.run(
                scripts.RESERVE,
                self.keys.tag,
                [self.keys.lease, self.keys.garbage],
                (token, note, manifests.pack_keys(keys)),
            )
            self._hold(bool(reserved), token)
        await chunks.put(self._home(kept), keys, pieces, None if kept else TRANSIENT_TTL_MS)

    async def commit(self, commit: Commit, token: int) -> None:
        """Make a version current, and drop those that are no longer kept.

        Raises:
            LeadershipLost: the token is not the newest; the version's own chunks are removed, unless an earlier
                try, whose reply was lost, made it current after all.
        """
        manifest, dropped = commit.manifest, commit.dropped
        own = [
            part
            for part in manifest.parts.values()
            if (part.version, part.token) == (manifest.version, token)
        ]
        note = _note(manifest.version, token)
        removal = f"{note}:dropped" if dropped else ""
        garbage = [key for old in dropped for key in old.keys(self.keys)]
        keys = self.keys
        done = await self._caller.run(
            scripts.COMMIT,
            keys.tag,
            [keys.lease, keys.current, keys.history, keys.garbage, keys.ledger],
            (
                token,
                manifest.version,
                manifests.encode(manifest),
                int(manifest.kept),
                note if manifest.kept else "",
                commit.ledger,
                LEDGER_ENTRIES,
                removal,
                manifests.pack_keys(garbage),
                *(old.version for old in dropped),
            ),
        )
        if not done:
            needed = await self._needed()
            for part in own:
                unneeded = [key for key in part.keys(keys) if key not in needed]
                await chunks.unlink(self._home(part.kept), unneeded)
        self._hold(bool(done), token)
        if dropped:
            await self.sweep(token)

    async def forget(self, part: Part) -> None:
        """Unlink a part that is not kept and that nothing needs any more."""
        await chunks.unlink(self._bulk, part.keys(self.keys))

    async def sweep(self, token: int) -> None:
        """Unlink what is noted as garbage and no checkpoint needs. For a leader, between its writes.

        A leader that was replaced without knowing it leaves its successor's notes alone: they may name chunks that
        are being written just now.
        """
        flat = await self._ask("HGETALL", self.keys.garbage)
        notes = {
            name: data
            for name, data in zip(flat[::2], flat[1::2], strict=True)
            if int(name.split(b":")[1]) <= token
        }
        if not notes:
            return
        needed = await self._needed()
        noted = {key for data in notes.values() for key in manifests.unpack_keys(data)}
        await chunks.unlink(self._caller, sorted(noted - needed))
        await self._ask("HDEL", self.keys.garbage, *notes)

    async def _needed(self) -> set[bytes]:
        return {key for manifest in await self.kept() for key in manifest.keys(self.keys)}

    async def ledger(self, count: int) -> list[bytes]:
        """The newest ``count`` entries of the run's ledger, oldest first."""
        rows = await self._ask("XREVRANGE", self.keys.ledger, "+", "-", "COUNT", count)
        return [fields[1] for _, fields in reversed(rows)]

    async def _ask(self, *command: Argument) -> Any:
        """One command in the run's slot that may be done twice."""
        return (await chunks.call_many(self._caller, self.keys.tag, [command]))[0]

    def _home(self, kept: bool) -> Caller:
        return self._caller if kept else self._bulk

    def _hold(self, done: bool, token: int) -> None:
        if not done:
            raise LeadershipLost(
                f"run {self.keys.run!r}: another master leads it now; token {token} is refused"
            )


def _note(version: int, token: int) -> str:
    return f"{version}:{token}"


async def _digests(kept: bool, pieces: Sequence[memoryview]) -> list[bytes]:
    digest = digest_of if kept else checksum_of
    if sum(map(len, pieces)) <= _SMALL_BYTES:
        return [digest(piece) for piece in pieces]
    return await asyncio.to_thread(lambda: [digest(piece) for piece in pieces])
