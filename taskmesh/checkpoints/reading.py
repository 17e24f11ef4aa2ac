"""A run's versions as they lie in Redis: found, loaded, and held against their digests."""

from __future__ import annotations

import logging
from typing import Any

from taskmesh.broker import chunks
from taskmesh.broker.caller import Caller
from taskmesh.broker.link import Argument
from taskmesh.checkpoints import manifest as manifests
from taskmesh.checkpoints.manifest import Manifest, Part, checksum_of, digest_of
from taskmesh.clock import Clock
from taskmesh.errors import CheckpointError
from taskmesh.keys import RunKeys

log = logging.getLogger("taskmesh.checkpoints")


class VersionReader:
    """Reads a run's versions. Anybody may."""

    def __init__(self, caller: Caller, bulk: Caller, keys: RunKeys) -> None:
        self._caller = caller
        self._bulk = bulk
        self.keys = keys

    @property
    def clock(self) -> Clock:
        """What the time is taken from."""
        return self._caller.clock

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
        if version is None:
            return current
        try:
            return await self.find_kept(version)
        except CheckpointError:
            if current.version != version:
                raise
            return current

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
            if current is None or "update" in current.parts:
                break
            try:
                return current, await self.load(current.parts["parameters"])
            except CheckpointError as error:
                last = error
        newest = await self.load_newest()
        if newest is None:
            raise last or CheckpointError(f"run {self.keys.run!r} has no version yet")
        return newest[0], newest[1]["parameters"]

    async def _ask(self, *command: Argument) -> Any:
        """One command in the run's slot that may be done twice."""
        return (await chunks.call_many(self._caller, self.keys.tag, [command]))[0]

    def _home(self, kept: bool) -> Caller:
        return self._caller if kept else self._bulk
