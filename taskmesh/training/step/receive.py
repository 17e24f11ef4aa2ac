"""One attempt's payload on its way in: piece by piece into memory, checked, decoded, and added to a round.

Pieces may be here before the result that says what they must be; until then they only lie ready. The threads that move
them call in here. What they find wrong is noted, and the shard is refused for it when all is there.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np

from taskmesh.broker import chunks
from taskmesh.broker.caller import Caller
from taskmesh.checkpoints.manifest import checksum_of
from taskmesh.errors import BrokerError, DecodeError
from taskmesh.tensors import FlatLayout
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression
from taskmesh.training.orders import ShardResult
from taskmesh.training.step.aggregate import Contribution, Round

log = logging.getLogger("taskmesh.training")
HEAD_ROOM = 65_536  # bytes that a compressed bucket may have beyond its values


class Receipts:
    """The payloads of one step's shards.

    One attempt at a shard has its memory at a time: the first that is heard of, until another's result comes. Results
    of one shard are taken one after the other, until one of them can be used.

    Args:
        key_of: where a piece lies, by shard, attempt and place.
    """

    def __init__(
        self,
        bulk: Caller,
        key_of: Callable[[int, str, int], bytes],
        round_: Round,
        buckets: tuple[Bucket, ...],
        layout: FlatLayout,
        compression: Compression,
    ) -> None:
        self._bulk = bulk
        self._key_of = key_of
        self._make = functools.partial(
            Receipt, round_=round_, buckets=buckets, layout=layout, compression=compression
        )
        self._receipts: dict[int, Receipt] = {}
        self._fetches: dict[Receipt, set[asyncio.Task[None]]] = {}
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._taken: set[int] = set()
        self._is_closed = False

    def hear(self, shard: int, attempt: str, places: Sequence[int]) -> None:
        """Pieces are there: fetch them, unless another attempt is being received."""
        if self._is_closed:
            return
        receipt = self._receipts.get(shard)
        if receipt is None:
            receipt = self._begin(shard, attempt)
        if receipt.attempt != attempt or receipt.has_result:
            return  # what the result names is fetched once, and nothing beside it
        fetch = asyncio.create_task(self._fetch_early(receipt, shard, places), name="taskmesh early")
        self._fetches[receipt].add(fetch)
        fetch.add_done_callback(self._fetches[receipt].discard)

    async def take(self, shard: int, result: ShardResult) -> str | None:
        """Receive what a result names. Returns why it cannot be used; None when its gradient is in the round."""
        async with self._turns[shard]:
            if shard in self._taken:
                return "another attempt came before it"
            fault = await self._take(shard, result)
            if fault is None:
                self._taken.add(shard)
            return fault

    def forget(self, shard: int) -> None:
        """What was taken of a shard turned out to be unusable: another result of it may be taken."""
        self._taken.discard(shard)

    async def _take(self, shard: int, result: ShardResult) -> str | None:
        receipt = self._receipts.get(shard)
        if receipt is not None:
            receipt.has_result = True
            await self._settled(receipt)
        if receipt is None or receipt.attempt != result.attempt or receipt.is_claimed:
            receipt = self._begin(shard, result.attempt)
            receipt.has_result = True
        if result.digests:
            await asyncio.to_thread(receipt.claim, result)
            if receipt.fault is None:
                await self._fetch(receipt, shard, receipt.lacking(), sum(result.sizes))
        else:
            receipt.claim(result)
            if receipt.fault is None:
                receipt.take_inline(result)
        return receipt.close()

    def _begin(self, shard: int, attempt: str) -> Receipt:
        receipt = self._receipts[shard] = self._make(attempt, shard)
        self._fetches[receipt] = set()
        return receipt

    async def _fetch(self, receipt: Receipt, shard: int, places: Sequence[int], size_bytes: int) -> None:
        keys = [self._key_of(shard, receipt.attempt, place) for place in places]
        if keys:
            await chunks.get(
                self._bulk,
                keys,
                lambda at, size: receipt.target(places[at], size),
                lambda at: receipt.taken(places[at]),
                size_bytes,
            )

    async def _fetch_early(self, receipt: Receipt, shard: int, places: Sequence[int]) -> None:
        try:
            await self._fetch(receipt, shard, places, chunks.LARGE_BYTES)
        except BrokerError as error:
            log.debug("pieces of shard %d: %s", shard, error)  # the result names them again

    async def _settled(self, receipt: Receipt) -> None:
        if self._fetches[receipt]:
            await asyncio.wait(self._fetches[receipt])

    async def close(self) -> None:
        """No memory is written into any more when this returns."""
        self._is_closed = True
        fetches = [fetch for fetches in self._fetches.values() for fetch in fetches]
        for fetch in fetches:
            fetch.cancel()
        await asyncio.gather(*fetches, return_exceptions=True)


class Receipt:
    """What one attempt brings.

    Attributes:
        fault: why it cannot be used; None as long as it can.
        has_result: the result is here; no piece is fetched before it is known what it must be any more.
    """

    def __init__(
        self,
        attempt: str,
        shard: int,
        round_: Round,
        buckets: tuple[Bucket, ...],
        layout: FlatLayout,
        compression: Compression,
    ) -> None:
        self.attempt = attempt
        self.fault: str | None = None
        self.has_result = False
        self._shard = shard
        self._round = round_
        self._buckets = buckets
        self._layout = layout
        self._compression = compression
        self._result: ShardResult | None = None
        self._memory: dict[int, memoryview] = {}
        self._arrived: dict[int, bytes] = {}  # with their digests
        self._claiming = threading.Lock()
        self._rest = 4 * (layout.float_count - layout.parameter_count) + 8 * layout.integer_count
        round_.prepare(shard)

    @property
    def is_claimed(self) -> bool:
        """Whether a result has said what the pieces are."""
        return self._result is not None

    # pieces

    def target(self, place: int, size: int) -> memoryview | None:
        """Where a piece of that size belongs; None where it is not wanted."""
        if place < len(self._buckets):
            bucket = self._buckets[place]
            if self._round.has(self._shard, place) or size > 4 * bucket.size + HEAD_ROOM:
                return None
            if self._compression.is_plain and size == 4 * bucket.size:
                self._memory[place] = self._round.memory(self._shard, place).data.cast("B")
                return self._memory[place]
        elif place > len(self._buckets) or size != self._rest:
            return None
        self._memory[place] = memoryview(bytearray(size))
        return self._memory[place]

    def taken(self, place: int) -> None:
        """A piece is there."""
        digest = checksum_of(self._memory[place])
        with self._claiming:
            self._arrived[place] = digest
            is_claimed = self._result is not None
        if is_claimed:
            self._settle(place)

    def take_inline(self, result: ShardResult) -> None:
        """Take what rides in the result."""
        data, at = memoryview(result.inline), 0
        for place, size in enumerate(result.sizes):
            into = self.target(place, len(data[at : at + size]))
            if into is not None:
                into[:] = data[at : at + size]
                self.taken(place)
            at += size

    # the result

    def claim(self, result: ShardResult) -> None:
        """The result says what the pieces are: those that are here are added, the others when they come."""
        self.fault = self._fault_of(result)
        if self.fault is not None:
            return
        self._round.open(self._shard, Contribution(result.loss_sum, result.count))
        with self._claiming:
            self._result = result
            for place in list(self._arrived):
                if not self._is_named(place):  # the piece has been sent again since
                    del self._arrived[place]
            arrived = list(self._arrived)
        for place in arrived:
            self._settle(place)

    def _fault_of(self, result: ShardResult) -> str | None:
        pieces = len(self._buckets) + bool(self._rest)
        if result.count < 0 or not np.isfinite(result.loss_sum):
            return f"a loss of {result.loss_sum} over {result.count} samples"
        if len(result.sizes) != pieces or len(result.digests) not in (0, pieces):
            return f"a payload in {len(result.sizes)} pieces; the layout takes {pieces}"
        if self._rest and result.sizes[-1] != self._rest:
            return f"buffers of {result.sizes[-1]} bytes; the layout takes {self._rest}"
        return None

    def lacking(self) -> list[int]:
        """The places of the pieces that are still to be fetched."""
        assert self._result is not None
        return [
            place
            for place in range(len(self._result.sizes))
            if place not in self._arrived
            and not (place < len(self._buckets) and self._round.has(self._shard, place))
        ]

    def _is_named(self, place: int) -> bool:
        """Whether a piece that is here is the one that the result names."""
        result = self._result
        assert result is not None
        is_whole = len(self._memory[place]) == result.sizes[place]
        return is_whole and (not result.digests or self._arrived[place] == result.digests[place])

    def _settle(self, place: int) -> None:
        """A piece is there, and it is known what it must be."""
        if not self._is_named(place):
            self.fault = f"piece {place} of the gradient is corrupt"
        elif place < len(self._buckets) and not self._round.has(self._shard, place):
            try:
                self._add(place, self._memory[place])
            except DecodeError as error:
                self.fault = str(error)

    def _add(self, place: int, data: memoryview) -> None:
        values = self._round.memory(self._shard, place)
        self._compression.decompress(data, values, self._buckets[place])
        if not np.isfinite(values).all():
            raise DecodeError("the decoded gradient is not finite")
        self._round.add(self._shard, place)

    def close(self) -> str | None:
        """All that comes is there. Returns why the result cannot be used, if so."""
        if self.fault is None and self.lacking():
            self.fault = "a piece of the gradient is gone"
        if self.fault is not None:
            return self.fault
        result, data = self._result, memoryview(b"")
        assert result is not None
        if self._rest:
            data = self._memory[len(self._buckets)]
        floats = np.frombuffer(data, np.float32, self._layout.float_count - self._layout.parameter_count)
        integers = np.frombuffer(data[4 * floats.size :], np.int64).copy()
        if not np.isfinite(floats).all():
            return "the change of the buffers is not finite"
        self._round.open(self._shard, Contribution(result.loss_sum, result.count, floats, integers))
        return None
