"""The worker's side of what compressions remember: found, written for checkpoints, handed over to other workers.

A state is looked for in this process, then where another worker may have handed it over, then in the checkpoint that
the order names. A worker that stops hands over all that it has, so that others go on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from taskmesh.app.mesh import Mesh
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import Part, checksum_of
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import CheckpointError, TaskmeshError
from taskmesh.keys import RunKeys
from taskmesh.tasks import Context
from taskmesh.training.memory import Memories, State, pack, size_of
from taskmesh.training.orders import MemoryOrder, MemoryResult, Remembered
from taskmesh.training.room import when_there_is_room

log = logging.getLogger("taskmesh.training")
HANDED_TTL_MS = 600_000


class Found(NamedTuple):
    """A state, and how many of its bytes came from another worker."""

    state: State
    moved_bytes: int = 0


class _Handed(NamedTuple):
    """What is written last of a state that is handed over: its size, and the digests of its chunks."""

    size_bytes: int
    digests: tuple[bytes, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Handed).decode


class Holding:
    """What the compression of a run's shards remembers, in one process.

    Args:
        unpack: makes a state of its bytes.

    Attributes:
        memories: the states that are here.
    """

    def __init__(self, mesh: Mesh, keys: RunKeys, unpack: Callable[[memoryview], Awaitable[State]]) -> None:
        self.memories = Memories()
        self._mesh = mesh
        self._keys = keys
        self._unpack = unpack

    async def find(self, shard: int, name: str, kept: Part | None = None) -> Found:
        """A state by its name.

        Args:
            kept: where a checkpoint has it.

        Raises:
            CheckpointError: it is nowhere, or damaged.
        """
        state = self.memories.get(shard, name)
        if state is not None:
            return Found(state)
        data = await self._load(kept) if kept is not None else await self._take_over(shard, name)
        state = await self._unpack(data)
        self.memories.keep(shard, "", name, state)
        return Found(state, 0 if kept is not None else len(data))

    async def write(self, order: MemoryOrder, context: Context) -> MemoryResult:
        """Write states that this worker holds, for a checkpoint or for others to go on with."""
        if order.holder not in ("", context.worker):
            context.pass_to(order.holder)
        parts: list[Part] = []
        for wanted in order.states:
            try:
                data = await self._read(wanted.shard, wanted.name)
            except CheckpointError as error:
                return MemoryResult(context.worker, reason=str(error))
            if order.token:
                parts.append(await self._write_kept(order, wanted, data))
            else:
                await self._hand_over(wanted.shard, wanted.name, data)
        return MemoryResult(context.worker, tuple(parts))

    async def leave(self) -> None:
        """This worker stops: hand over what it has."""
        states = self.memories.in_use()
        if not states or not self._mesh.is_connected:
            return
        try:
            for shard, name, state in states:
                await self._hand_over(shard, name, await asyncio.to_thread(pack, state))
        except TaskmeshError as error:
            log.warning("run %s: what compressions remember here is lost: %s", self._keys.run, error)
            return
        size_bytes = sum(size_of(state) for *_, state in states)
        log.info("run %s: %d states (%d bytes) are left to others", self._keys.run, len(states), size_bytes)

    @property
    def _store(self) -> VersionStore:
        client = self._mesh.client
        return VersionStore(client.caller, client.bulk, self._keys)

    async def _load(self, part: Part) -> memoryview:
        return await self._store.load(part)

    async def _read(self, shard: int, name: str) -> memoryview:
        """A state's bytes, if it is here or was handed over."""
        state = self.memories.get(shard, name)
        if state is None:
            return await self._take_over(shard, name)
        return await asyncio.to_thread(pack, state)

    async def _write_kept(self, order: MemoryOrder, wanted: Remembered, data: memoryview) -> Part:
        return await when_there_is_room(
            lambda: self._store.write_part(order.version, order.token, wanted.first, data, wanted.earlier),
            f"run {self._keys.run}",
        )

    async def _hand_over(self, shard: int, name: str, data: memoryview) -> None:
        pieces = chunks.split(data)
        record = _Handed(len(data), await asyncio.to_thread(_digests, pieces))
        caller = self._mesh.client.bulk
        await chunks.put(caller, self._places(shard, name, len(pieces)), pieces, HANDED_TTL_MS)
        head = self._keys.memory(shard, name, 0)
        await chunks.put(caller, [head], [memoryview(_encode(record))], HANDED_TTL_MS)

    async def _take_over(self, shard: int, name: str) -> memoryview:
        """A state that another worker has handed over."""
        record = await self._read_record(shard, name)
        data = memoryview(bytearray(record.size_bytes))
        pieces = chunks.split(data)
        missing = set(range(len(pieces)))

        def check(place: int) -> None:
            if checksum_of(pieces[place]) == record.digests[place]:
                missing.discard(place)

        await chunks.get(
            self._mesh.client.bulk,
            self._places(shard, name, len(pieces)),
            lambda place, size: pieces[place] if size == len(pieces[place]) else None,
            check,
            record.size_bytes,
        )
        if missing:
            raise CheckpointError(f"what was handed over for shard {shard} is gone or damaged")
        return data

    async def _read_record(self, shard: int, name: str) -> _Handed:
        found: list[bytearray] = []

        def target(place: int, size: int) -> memoryview:
            found[:] = [bytearray(size)]
            return memoryview(found[0])

        head = self._keys.memory(shard, name, 0)
        await chunks.get(self._mesh.client.bulk, [head], target, lambda place: None, 0)
        if not found:
            raise CheckpointError(f"nobody has what the compression of shard {shard} remembered")
        try:
            record = _decode(found[0])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise CheckpointError(f"what was handed over for shard {shard} is damaged: {error}") from None
        if record.size_bytes < 0 or len(record.digests) != -(-record.size_bytes // chunks.CHUNK_BYTES):
            raise CheckpointError(f"what was handed over for shard {shard} is damaged")
        return record

    def _places(self, shard: int, name: str, count: int) -> list[bytes]:
        return [self._keys.memory(shard, name, place + 1) for place in range(count)]


def _digests(pieces: Sequence[memoryview]) -> tuple[bytes, ...]:
    return tuple(map(checksum_of, pieces))
