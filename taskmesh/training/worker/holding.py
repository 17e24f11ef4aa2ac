"""The worker's side of what compressions remember: found, written for checkpoints, handed over to other workers.

A state is looked for in this process, then where another worker may have handed it over, then in the checkpoint that
the order names. What is for a checkpoint is written beside the shards that are computed. A worker that stops hands over
all that it has, so that others go on with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from taskmesh.app.mesh import Mesh
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import Part, checksum_of
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import CheckpointError, TaskmeshError
from taskmesh.keys import RunKeys
from taskmesh.tasks import Context
from taskmesh.training.memory import Held, Memories, packed
from taskmesh.training.orders import MemoryOrder, MemoryResult, Remembered, ShardOrder
from taskmesh.training.room import when_there_is_room

log = logging.getLogger("taskmesh.training")
HANDED_TTL_MS = 600_000
AT_ONCE = 0.02  # seconds that a small state may take, so that nobody has to ask again


class Found(NamedTuple):
    """A state, and how many of its bytes came from another worker; None for nothing."""

    state: Held | None
    moved_bytes: int = 0


class _Handed(NamedTuple):
    """What is written last of a state that is handed over: its size, and the digests of its chunks."""

    size_bytes: int
    digests: tuple[bytes, ...]


@dataclass(slots=True)
class _Writing:
    """What is being written for a checkpoint, and whether its master knows that it is."""

    task: asyncio.Task[list[Part]]
    states: Sequence[Held]
    is_told: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Handed).decode


class Holding:
    """What the compression of a run's shards remembers, in one process.

    Attributes:
        memories: the states that are here.
    """

    def __init__(self, mesh: Mesh, keys: RunKeys) -> None:
        self.memories = Memories()
        self._mesh = mesh
        self._keys = keys
        self._writing: dict[MemoryOrder, _Writing] = {}

    async def find(self, order: ShardOrder) -> Found:
        """What the compression of a shard is to go on from.

        Raises:
            CheckpointError: it is nowhere, or damaged.
        """
        if not order.memory:
            return Found(None)
        state = self.memories.get(order.shard, order.memory)
        if state is not None:
            return Found(state)
        if order.kept_memory is not None:
            return Found(await self._store.load(order.kept_memory))
        data = await self._take_over(order.shard, order.memory)
        return Found(data, len(data))

    async def write(self, order: MemoryOrder, context: Context) -> MemoryResult:
        """Write states that this worker holds, for a checkpoint or for others to go on with.

        What is for a checkpoint is written while shards are computed; the states are held on to until it is.
        """
        if order.holder not in ("", context.worker):
            context.pass_to(order.holder)
        try:
            if not order.token:
                for each in order.states:
                    await self._hand_over(each.shard, each.name, await self._hold(each))
                return MemoryResult(context.worker)
            writing = self._writing.get(order) or await self._begin(order)
        except CheckpointError as error:
            return MemoryResult(context.worker, reason=str(error))
        await asyncio.wait({writing.task}, timeout=AT_ONCE)
        if not writing.task.done():
            return MemoryResult(context.worker, ready=False)
        writing.is_told, writing.states = True, ()
        return MemoryResult(context.worker, tuple(writing.task.result()))

    async def _begin(self, order: MemoryOrder) -> _Writing:
        """Hold on to what an order names, and begin to write it."""
        states = [await self._hold(each) for each in order.states]
        task = asyncio.create_task(self._write_all(order, states), name="taskmesh memories")
        task.add_done_callback(_look_at)  # the master may have gone
        self._writing = {
            old: it
            for old, it in self._writing.items()
            if not it.task.done()
            # A master asks for one checkpoint at a time: of an earlier one nobody will.
            or not (it.is_told or (old.token, old.version) != (order.token, order.version))
        }
        self._writing[order] = _Writing(task, states)
        return self._writing[order]

    async def _write_all(self, order: MemoryOrder, states: Sequence[Held]) -> list[Part]:
        return [
            await self._write_kept(order, each, await asyncio.to_thread(packed, state))
            for each, state in zip(order.states, states, strict=True)
        ]

    async def leave(self) -> None:
        """This worker stops: hand over what it has."""
        states: dict[tuple[int, str], Held] = {
            (shard, name): state for shard, name, state in self.memories.in_use()
        }
        for order, writing in self._writing.items():
            if not writing.is_told:
                names = [(each.shard, each.name) for each in order.states]
                states |= dict(zip(names, writing.states, strict=True))
        if not states or not self._mesh.is_connected:
            return
        size_bytes = 0
        try:
            for (shard, name), state in states.items():
                size_bytes += await self._hand_over(shard, name, state)
        except TaskmeshError as error:
            log.warning("run %s: what compressions remember here is lost: %s", self._keys.run, error)
            return
        log.info("run %s: %d states (%d bytes) are left to others", self._keys.run, len(states), size_bytes)

    @property
    def _store(self) -> VersionStore:
        client = self._mesh.client
        return VersionStore(client.caller, client.bulk, self._keys)

    async def _hold(self, wanted: Remembered) -> Held:
        """A state that is here or was handed over."""
        state = self.memories.get(wanted.shard, wanted.name)
        return await self._take_over(wanted.shard, wanted.name) if state is None else state

    async def _write_kept(self, order: MemoryOrder, wanted: Remembered, data: memoryview) -> Part:
        return await when_there_is_room(
            lambda: self._store.write_part(order.version, order.token, wanted.first, data, wanted.earlier),
            f"run {self._keys.run}",
        )

    async def _hand_over(self, shard: int, name: str, state: Held) -> int:
        """Write a state to where others find it; its bytes."""
        data = await asyncio.to_thread(packed, state)
        pieces = chunks.split(data)
        record = _Handed(len(data), await asyncio.to_thread(_digests, pieces))
        caller = self._mesh.client.bulk
        await chunks.put(caller, self._places(shard, name, len(pieces)), pieces, HANDED_TTL_MS)
        head = self._keys.memory(shard, name, 0)
        await chunks.put(caller, [head], [memoryview(_encode(record))], HANDED_TTL_MS)
        return len(data)

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


def _look_at(task: asyncio.Task[list[Part]]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("what compressions remember is not written: %s", error)


def _digests(pieces: Sequence[memoryview]) -> tuple[bytes, ...]:
    return tuple(map(checksum_of, pieces))
