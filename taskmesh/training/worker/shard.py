"""The worker's side of a step: the handlers that have shards computed and send what came of them.

A worker process fetches the parameters of a version once, whatever the number of its shards; the next version, while a
shard before it is computed. Buckets of a gradient leave while backward is still at the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from torch import Tensor

from taskmesh.app.mesh import Mesh
from taskmesh.broker import chunks
from taskmesh.broker.chunks import LARGE_BYTES, Upload
from taskmesh.checkpoints.manifest import Part
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import BrokerFull, CheckpointError, ConfigurationError
from taskmesh.keys import RunKeys
from taskmesh.tasks import Context
from taskmesh.training import notes
from taskmesh.training.compute import compute
from taskmesh.training.fingerprint import fingerprint
from taskmesh.training.host import HostMemory, host_name
from taskmesh.training.memory import Held
from taskmesh.training.notes import Note
from taskmesh.training.orders import (
    GRADIENT_TTL_MS,
    MemoryOrder,
    MemoryResult,
    ShardFailed,
    ShardOrder,
    ShardResult,
)
from taskmesh.training.room import when_there_is_room
from taskmesh.training.worker.follower import Follower
from taskmesh.training.worker.group import Member
from taskmesh.training.worker.holding import Holding
from taskmesh.training.worker.parameters import Versions
from taskmesh.training.worker.ranks import Ranks
from taskmesh.training.worker.replica import Computed, Gradients, Recipe, Replica

# Riding in the result is no faster (9,610 parameters, 8 shards, one machine: 10.5 to 11.4 ms a step either way), and
# a result is written twice into the append-only file of the durable server; it saves small models their keys.
INLINE_BYTES = 4 * 1024


class Shards:
    """The handlers of one run in one process."""

    def __init__(self, mesh: Mesh, keys: RunKeys, recipe: Recipe) -> None:
        self._mesh = mesh
        self._keys = keys
        self._recipe = recipe
        self._replica: Replica = Replica(recipe)
        self._gradients = Gradients()
        self._holding = Holding(mesh, keys)
        host = HostMemory(host_name(mesh.settings.url, keys))
        self._versions = Versions(self._load, host)
        self._follower = recipe.follow and Follower(recipe.follow, host)

    def join(self, ranks: Ranks) -> Member:
        """Compute shards together with other ranks from now on.

        Raises:
            ConfigurationError: this run's shards take steps of their own.
        """
        recipe = self._recipe
        if recipe.local is not None:
            raise ConfigurationError(
                f"run {recipe.run!r} takes local steps, which groups do not: its workers are single processes"
            )
        self._recipe = recipe._replace(fingerprint=fingerprint(recipe.threads, ranks.size))
        self._replica = member = Member(self._recipe, ranks)
        return member

    async def gradient(self, order: ShardOrder, context: Context) -> ShardResult:
        """Compute one shard.

        Raises:
            ShardFailed: this process has another model, or a loss function that does not do what it must, or raised.
        """
        started = time.monotonic()
        if context.worker in order.avoid:
            return ShardResult("declined", context.worker)
        if order.fingerprint not in ("", self._recipe.fingerprint):
            return ShardResult("unlike", context.worker, self._recipe.fingerprint)
        if order.holder not in ("", context.worker):
            context.pass_to(order.holder)
        try:
            held, moved_bytes = await self._holding.find(order)
        except CheckpointError as error:
            return ShardResult("forgot", context.worker, str(error))
        attempt = f"{context.task_id}.{context.deliveries}"
        with self._gradients.lend() as memory:
            try:
                async with self._versions.use(order.parameters, order.update) as parameters:
                    found = await self._compute_and_send(order, parameters, memory, held, attempt)
            except CheckpointError as error:
                return ShardResult("gone", context.worker, str(error))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                raise ShardFailed(context.worker, reason) from error
            if found.reason is not None:
                return ShardResult("refused", context.worker, found.reason)
            if found.memory:
                self._holding.memories.keep(order.shard, order.memory, attempt, found.memory)
                self._holding.memories.note_use(order.shard, order.version)
            is_small = sum(piece.nbytes for piece in found.pieces) <= INLINE_BYTES
            return ShardResult(
                "computed",
                context.worker,
                "",
                found.loss_sum,
                found.samples,
                tuple(piece.nbytes for piece in found.pieces),
                b"".join(found.pieces) if is_small else b"",
                attempt,
                () if is_small else found.digests,
                bool(found.memory),
                moved_bytes,
                time.monotonic() - started,
            )

    async def write_memory(self, order: MemoryOrder, context: Context) -> MemoryResult:
        """Write what the compression of shards remembers here, for a checkpoint or for another worker."""
        return await self._holding.write(order, context)

    async def leave(self) -> None:
        """This worker stops."""
        await self._holding.leave()

    async def infer(self, parameters: Part, layout: str, rows: Tensor) -> Tensor:
        """The model's outputs for a batch of inputs, in evaluation mode.

        Raises:
            CheckpointError: the parameters are gone.
        """
        async with self._versions.use(parameters) as values:
            return await compute(self._replica.infer, parameters, layout, rows, values)

    async def _compute_and_send(
        self,
        order: ShardOrder,
        parameters: memoryview,
        memory: list[Tensor],
        state: Held | None,
        attempt: str,
    ) -> Computed:
        bulk = self._mesh.client.bulk

        def key_of(place: int) -> bytes:
            return self._keys.gradient(order.version, order.shard, attempt, place)

        if len(parameters) < LARGE_BYTES:
            found = await compute(self._replica.compute, order, parameters, memory, state, _leave)
            if sum(piece.nbytes for piece in found.pieces) > INLINE_BYTES:
                await self._send(found, key_of)
            return found

        def tell(places: Sequence[int]) -> Sequence[bytes]:
            note = Note(order.version, order.shard, attempt, tuple(places))
            return notes.write(self._keys.notes, note)

        upload = Upload(bulk, key_of, GRADIENT_TTL_MS, tell)
        sending = asyncio.create_task(upload.run(), name="taskmesh gradient")
        try:
            found = await compute(self._replica.compute, order, parameters, memory, state, upload.add)
        finally:
            upload.end()
            await asyncio.wait([sending])
        try:
            sending.result()
        except BrokerFull:
            await self._send(found, key_of)
        return found

    async def _send(self, found: Computed, key_of: Callable[[int], bytes]) -> None:
        keys = [key_of(place) for place in range(len(found.pieces))]
        await when_there_is_room(
            lambda: chunks.put(self._mesh.client.bulk, keys, found.pieces, GRADIENT_TTL_MS),
            f"run {self._recipe.run}",
        )

    async def _load(self, part: Part, update: Part | None, into: memoryview) -> None:
        client = self._mesh.client
        store = VersionStore(client.caller, client.bulk, self._keys)
        if update is None:
            await store.load(part, into)
        elif self._follower is None:
            raise CheckpointError(f"run {self._recipe.run!r}: version {part.version} comes as a step")
        else:
            await self._follower.bring(store, part, update, into)


def _leave(place: int, piece: memoryview) -> None:
    """A piece of a small payload: it goes with the others."""
