"""A run's versions in Redis.

Every version is current for a while: its parameters lie on the server without AOF, with a time to live besides, and
one script in the run's slot makes it current when they are complete. Some versions are kept as well: a second record
of the same version, with all that a run needs to go on, on the durable server. It takes its time, beside the steps
that follow, and another script puts it into the history when it is complete; until then nobody sees it.

Chunks that no checkpoint needs are noted as garbage in that same script (those of a checkpoint even before they are
written), then unlinked, then the note is struck out: a master that dies anywhere on the way leaves a note for the
next one's ``sweep``. What a checkpoint borrows from an earlier one is needed as long as either is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from taskmesh.broker import chunks, scripts
from taskmesh.checkpoints import manifest as manifests
from taskmesh.checkpoints.manifest import Manifest, Part, checksum_of, digest_of
from taskmesh.checkpoints.reading import VersionReader
from taskmesh.checkpoints.shelf import lend, without
from taskmesh.errors import CheckpointError, LeadershipLost

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


class VersionStore(VersionReader):
    """Reads a run's versions, and writes them for the holder of a fencing token."""

    # versions that become current

    async def write(self, version: int, token: int, value: memoryview | bytes) -> Part:
        """Write a version's parameters, to be formed again should they be lost; ``commit`` makes it current.

        Raises:
            BrokerFull: the server has no room.
        """
        pieces = chunks.split(memoryview(value))
        part = Part(False, version, token, 0, len(value), await _digests(False, pieces))
        await chunks.put(self._bulk, part.keys(self.keys), pieces, TRANSIENT_TTL_MS)
        return part

    async def write_update(
        self, version: int, token: int, update: bytes, value: memoryview
    ) -> dict[str, Part]:
        """Write what leads to a version's parameters instead of them.

        Args:
            value: the parameters, of which only the digests are taken.

        Returns:
            The parts "update" and "parameters".

        Raises:
            BrokerFull: the server has no room.
        """
        part = await self.write(version, token, update)
        digests = await _digests(False, chunks.split(value))
        unwritten = Part(False, version, token, len(part.digests), len(value), digests)
        return {"update": part, "parameters": unwritten}

    async def commit(self, commit: Commit, token: int) -> None:
        """Make a version current; one that is kept (a rollback's, with the chunks of another) is in the history too.

        Raises:
            LeadershipLost: the token is not the newest.
        """
        manifest, dropped = commit.manifest, commit.dropped
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
                commit.ledger,
                LEDGER_ENTRIES,
                *self._removal(manifest.version, token, dropped),
            ),
        )
        if not done and not manifest.kept:
            await self.forget(manifest.parts.get("update", manifest.parts["parameters"]))
        self._hold(bool(done), token)
        if dropped:
            await self.sweep(token)

    async def forget(self, part: Part) -> None:
        """Unlink a part that is not kept and that nothing needs any more."""
        await chunks.unlink(self._bulk, part.keys(self.keys))

    async def rewrite(self, part: Part, value: memoryview, token: int) -> None:
        """Write again the chunks of a part that were lost or damaged.

        Args:
            value: what they held.

        Raises:
            CheckpointError: it is not what they held.
            LeadershipLost: the token is not the newest.
            BrokerFull: the server has no room.
        """
        pieces = chunks.split(value)
        if await _digests(part.kept, pieces) != part.digests:
            raise CheckpointError(f"run {self.keys.run!r}: this is not what version {part.version} held")
        keys = part.keys(self.keys)
        if part.kept:
            await self._reserve(f"{part.version}:{token}:again", keys, token)
        await chunks.put(self._home(part.kept), keys, pieces, None if part.kept else TRANSIENT_TTL_MS)

    # versions that are kept

    async def write_kept(
        self,
        version: int,
        token: int,
        parts: Mapping[str, memoryview | bytes],
        earlier: Manifest | None = None,
        written: Mapping[str, Part] = MappingProxyType({}),
    ) -> dict[str, Part]:
        """Write what is to be kept of a version; it is a checkpoint with ``keep``. None of it may change meanwhile.

        Args:
            earlier: a checkpoint of the history. Chunks that it has at the same place are not written again, if they
                are still there. It must be known to be whole: what is damaged in it is then damaged in both.
            written: parts that others have written for it (``write_part``), or that an earlier checkpoint has.

        Raises:
            LeadershipLost: the token is not the newest.
            CheckpointError: what others have written is not there any more.
            BrokerFull: the server has no room; what was written is removed later.
        """
        pieces = {name: chunks.split(memoryview(value)) for name, value in parts.items()}
        first = _after(version, token, written.values())
        described = await asyncio.to_thread(_describe, version, token, pieces, earlier, first)
        described = {name: await self._without_lost(part) for name, part in described.items()}
        keys = [key for part in described.values() for key in part.own_keys(self.keys)]
        own = [pieces[name][place] for name, part in described.items() for place in part.own]
        others = [key for part in written.values() for key in part.own_keys(self.keys)]
        await self._reserve(_note(version, token), [*keys, *others], token)
        await chunks.put(self._caller, keys, own)
        if not all(await chunks.make_last(self._caller, others)):
            raise CheckpointError(f"run {self.keys.run!r}: what was written for version {version} is gone")
        return {**described, **written}

    async def write_part(
        self, version: int, token: int, first: int, value: memoryview, earlier: Part | None
    ) -> Part:
        """Write one part of a version that is to be kept, on behalf of the master whose token it is.

        It goes after an hour unless that master's ``write_kept`` makes it last. May be done again, also too late:
        what is there by then stays as it is.

        Args:
            first: index of its first chunk within the version.
            earlier: the same part of a checkpoint, whose chunks are borrowed where they are equal.

        Raises:
            BrokerFull: the server has no room.
        """
        pieces = chunks.split(value)
        part = lend(Part(True, version, token, first, len(value), await _digests(True, pieces)), earlier)
        part = await self._without_lost(part)
        own = [pieces[place] for place in part.own]
        await chunks.put(self._caller, part.own_keys(self.keys), own, TRANSIENT_TTL_MS, once=True)
        return part

    async def _without_lost(self, part: Part) -> Part:
        """Without loans of chunks that the server has lost: they would be lost to this version too."""
        if not part.loans:
            return part
        own = set(part.own)
        lent = {place: key for place, key in enumerate(part.keys(self.keys)) if place not in own}
        there = await chunks.are_there(self._caller, list(lent.values()))
        return without(part, [place for place, is_there in zip(lent, there, strict=True) if not is_there])

    async def _reserve(self, note: str, keys: list[bytes], token: int) -> None:
        """Note chunks before they are written, as garbage unless a checkpoint needs them by then."""
        reserved = await self._caller.run(
            scripts.RESERVE,
            self.keys.tag,
            [self.keys.lease, self.keys.garbage],
            (token, note, manifests.pack_keys(keys)),
        )
        self._hold(bool(reserved), token)

    async def keep(
        self,
        manifest: Manifest,
        token: int,
        dropped: Sequence[Manifest] = (),
        stands_for: Manifest | None = None,
    ) -> None:
        """Put a version whose chunks are written into the history, and drop others.

        Args:
            stands_for: the same version as it became current; if it still is, this one takes its place.

        Raises:
            LeadershipLost: the token is not the newest. The version's own chunks are removed, unless an earlier try,
                whose reply was lost, put it into the history after all.
        """
        keys = self.keys
        done = await self._caller.run(
            scripts.KEEP,
            keys.tag,
            [keys.lease, keys.current, keys.history, keys.garbage],
            (
                token,
                manifest.version,
                manifests.encode(manifest),
                b"" if stands_for is None else manifests.encode(stands_for),
                _note(manifest.version, token),
                *self._removal(manifest.version, token, dropped),
            ),
        )
        if not done:
            needed = await self._needed()
            own = [key for part in manifest.parts.values() for key in part.own_keys(keys)]
            await chunks.unlink(self._caller, [key for key in own if key not in needed])
        self._hold(bool(done), token)
        if dropped:
            await self.sweep(token)

    async def drop(self, dropped: Sequence[Manifest], token: int) -> None:
        """Take checkpoints out of the history, with the chunks that no other needs. Not beside a run under way.

        Raises:
            LeadershipLost: the token is not the newest.
        """
        if not dropped:
            return
        keys = self.keys
        done = await self._caller.run(
            scripts.DROP,
            keys.tag,
            [keys.lease, keys.history, keys.garbage],
            (token, *self._removal(dropped[-1].version, token, dropped)),
        )
        self._hold(bool(done), token)
        await self.sweep(token)

    async def delete(self, token: int) -> int:
        """Remove all of the run: versions, ledger, keys. Not beside a run under way. Returns how many were kept.

        Should it be interrupted, it can be done again. What workers and masters left that has a time to live goes with
        that; the lease stays, with the number of the last token.

        Raises:
            LeadershipLost: the token is not the newest.
        """
        kept, current, keys = await self.kept(), await self.current(), self.keys
        await self.drop(kept, token)
        await self.sweep(token)
        if current is not None and not current.kept:
            await self.forget(current.parts.get("update", current.parts["parameters"]))
        done = await self._caller.run(
            scripts.DELETE_RUN, keys.tag, [keys.lease, keys.current, keys.history, keys.ledger], (token,)
        )
        self._hold(bool(done), token)
        await chunks.unlink(self._bulk, [keys.notes])
        return len(kept)

    def _removal(
        self, version: int, token: int, dropped: Sequence[Manifest]
    ) -> tuple[str | bytes | int, ...]:
        """What the scripts take of versions that leave: the note's name, its chunks, the versions."""
        garbage = [key for old in dropped for key in old.keys(self.keys)]
        return (
            f"{_note(version, token)}:dropped" if dropped else "",
            manifests.pack_keys(garbage),
            *(old.version for old in dropped),
        )

    async def sweep(self, token: int) -> None:
        """Unlink what is noted as garbage and no checkpoint needs. For a leader, while it writes no checkpoint.

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

    def _hold(self, done: bool, token: int) -> None:
        if not done:
            raise LeadershipLost(
                f"run {self.keys.run!r}: another master leads it now; token {token} is refused"
            )


def _note(version: int, token: int) -> str:
    return f"{version}:{token}"


def _after(version: int, token: int, parts: Iterable[Part]) -> int:
    """The index of the first chunk behind those that these parts have in a version."""
    ends = [
        part.first + len(part.digests) for part in parts if (part.version, part.token) == (version, token)
    ]
    return max(ends, default=0)


def _describe(
    version: int,
    token: int,
    pieces: Mapping[str, Sequence[memoryview]],
    earlier: Manifest | None,
    first: int,
) -> dict[str, Part]:
    """The parts with their digests, and with loans where the earlier checkpoint has the same chunks."""
    lenders = {} if earlier is None else earlier.parts
    described: dict[str, Part] = {}
    for name, cut in pieces.items():
        digests = tuple(map(digest_of, cut))
        part = Part(True, version, token, first, sum(map(len, cut)), digests)
        described[name] = lend(part, lenders.get(name))
        first += len(cut)
    return described


async def _digests(kept: bool, pieces: Sequence[memoryview]) -> tuple[bytes, ...]:
    digest = digest_of if kept else checksum_of
    if sum(map(len, pieces)) <= _SMALL_BYTES:
        return tuple(map(digest, pieces))
    return await asyncio.to_thread(lambda: tuple(map(digest, pieces)))
