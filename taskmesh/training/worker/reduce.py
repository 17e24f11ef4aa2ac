"""The worker's side of a sharded reduce: ranges of a step's gradient are summed by workers, as tasks like any other.

Together the workers are a parameter server, as large as there are workers. A range is reduced by what reduces the whole
gradient in the master, in the same tree over the shards, so the bits are the same whoever does it. The order says all
that there is to know of the range: no model is needed.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from taskmesh.app.mesh import Mesh
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import checksum_of
from taskmesh.errors import TrainingError
from taskmesh.tasks import Context
from taskmesh.tensors import FlatLayout
from taskmesh.training.orders import GRADIENT_TTL_MS, ShardResult
from taskmesh.training.ranges import Pieces, ReduceOrder, ReduceResult
from taskmesh.training.robust import Mean, Robust
from taskmesh.training.room import when_there_is_room
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.aggregate import Pool, Round, Values
from taskmesh.training.step.receive import Receipts

SHARDS_AT_ONCE = 4
_NO_BUFFERS = FlatLayout((), (), (), "")


class _RangeRound(Round):
    """A round of some of a gradient's buckets, which lie one after the other in its memory."""

    def __init__(self, order: ReduceOrder, pool: Pool, robust: Robust | None) -> None:
        super().__init__(order.shards, order.buckets, pool, robust)
        self._ends = list(itertools.accumulate(bucket.size for bucket in order.buckets))
        self._lowest = order.pieces[0].shard

    def memory(self, shard: int, bucket: int) -> Values:
        end = self._ends[bucket]
        return self._memory[shard][end - self._buckets[bucket].size : end]

    def reduced(self) -> list[memoryview]:
        """The buckets' mean gradients, when all is there."""
        return [self.memory(self._lowest, place).data.cast("B") for place in range(len(self._buckets))]


class Reducer:
    """The handler of one run in one process."""

    def __init__(self, mesh: Mesh, setup: RunSetup) -> None:
        self._mesh = mesh
        self._setup = setup
        self._pool = Pool(0, 0)
        self._pool_values = 0

    async def reduce(self, order: ReduceOrder, context: Context) -> ReduceResult:
        """Reduce one range.

        Raises:
            TrainingError: this process has other settings than the master.
        """
        if context.worker in order.avoid:
            return ReduceResult("declined", context.worker)
        setup = self._setup
        if order.agreement != setup.agreement:
            raise TrainingError(
                f"run {setup.name!r}: this worker goes by {setup.agreement}, the master by {order.agreement}; "
                "it runs other code"
            )
        aggregation = setup.aggregation
        robust = None if isinstance(aggregation, Mean) else aggregation
        round_ = _RangeRound(order, self._pool_for(order), robust)
        for shard in sorted({*range(order.shards)} - {pieces.shard for pieces in order.pieces}):
            round_.leave_out(shard)
        refused = await self._receive(order, round_)
        attempt = f"{context.task_id}.{context.deliveries}"
        digests = () if refused else await self._send(order, attempt, round_.reduced())
        round_.release()
        return ReduceResult("refused" if refused else "reduced", context.worker, refused, attempt, digests)

    def _pool_for(self, order: ReduceOrder) -> Pool:
        values = sum(bucket.size for bucket in order.buckets)
        if values > self._pool_values:
            self._pool, self._pool_values = Pool(values), values
        return self._pool

    async def _receive(self, order: ReduceOrder, round_: Round) -> tuple[tuple[int, str], ...]:
        """Put each shard's pieces into the round; those that cannot be used, with the reasons."""
        setup = self._setup

        def key_of(shard: int, attempt: str, place: int) -> bytes:
            return setup.keys.gradient(order.version, shard, attempt, order.first + place)

        receipts = Receipts(
            self._mesh.client.bulk, key_of, round_, order.buckets, _NO_BUFFERS, setup.compression
        )
        few = asyncio.Semaphore(SHARDS_AT_ONCE)  # neighbours are added up, and their memory is free again

        async def take(pieces: Pieces) -> str | None:
            async with few:
                return await receipts.take(pieces.shard, _as_result(pieces))

        taking = [asyncio.create_task(take(pieces), name="taskmesh pieces") for pieces in order.pieces]
        try:
            faults = await asyncio.gather(*taking)
        finally:
            for task in taking:
                task.cancel()
            await asyncio.gather(*taking, return_exceptions=True)
        found = zip(order.pieces, faults, strict=True)
        return tuple((pieces.shard, fault) for pieces, fault in found if fault is not None)

    async def _send(
        self, order: ReduceOrder, attempt: str, reduced: Sequence[memoryview]
    ) -> tuple[bytes, ...]:
        places = range(order.first, order.first + len(reduced))
        keys = [self._setup.keys.reduced(order.version, attempt, place) for place in places]
        digests = await asyncio.to_thread(lambda: tuple(map(checksum_of, reduced)))
        await when_there_is_room(
            lambda: chunks.put(self._mesh.client.bulk, keys, reduced, GRADIENT_TTL_MS),
            f"run {self._setup.name}",
        )
        return digests


def _as_result(pieces: Pieces) -> ShardResult:
    """What a shard would have answered that has these pieces only."""
    return ShardResult(
        "computed",
        "",
        count=pieces.count,
        sizes=pieces.sizes,
        attempt=pieces.attempt,
        digests=pieces.digests,
    )
