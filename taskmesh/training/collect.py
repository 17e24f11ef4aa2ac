"""A step's shards: published, collected, refused where they are unusable, and computed again.

A shard comes from whatever worker computes it; the death of one is the engine's business (redelivery). Here it is
decided whether a result can be used. What is refused (not finite, damaged, a handler that raised) goes out again a
bounded number of times, to others where there are others. Results of earlier steps find nobody who waits for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from taskmesh.app.client import Client
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import ResultUnavailable, TaskCancelled, TaskFailed, TrainingError
from taskmesh.events import Observers, ShardRefused
from taskmesh.keys import partition_of
from taskmesh.results.handle import Handle
from taskmesh.tasks import MAX_DELIVERIES
from taskmesh.tensors import FlatLayout
from taskmesh.training import notes
from taskmesh.training.aggregate import Pool, Round
from taskmesh.training.buckets import Bucket, cut
from taskmesh.training.keeper import Keeper
from taskmesh.training.ledger import Share
from taskmesh.training.memory import MemoryGone
from taskmesh.training.notes import Note
from taskmesh.training.orders import ShardOrder, ShardResult
from taskmesh.training.plan import Plan
from taskmesh.training.receive import Receipts
from taskmesh.training.robust import Mean
from taskmesh.training.room import when_there_is_room
from taskmesh.training.roster import PATIENCE, Roster, Seat
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")
FIRST_DELAY = 0.005  # after a worker that is avoided has declined; doubled each time
LONGEST_DELAY = 1.0
MAX_REPUBLICATIONS = 5
KEPT_ARRAYS = 8


class GradientTask(Protocol):
    """The run's gradient task, as far as it is used here."""

    async def submit_in(self, delay: float, order: ShardOrder, /) -> Handle[ShardResult]: ...

    async def submit(self, order: ShardOrder, /) -> Handle[ShardResult]: ...


class Gathered(NamedTuple):
    """What a round came to.

    Attributes:
        fault: why the step cannot be taken; None when all shards are there.
        uplink_bytes: payloads that came in and were used: compressed gradients with their heads, and buffers.
        seats: who holds which shard once the step is taken.
        anew: the shards whose compression remembers, and began with nothing.
        moved: bytes of what other workers had remembered and handed over, by shard.
    """

    round: Round
    fault: str | None
    shares: tuple[Share, ...]
    uplink_bytes: int
    seats: Mapping[int, Seat]
    anew: tuple[int, ...]
    moved: Mapping[int, int]


class _Answer(NamedTuple):
    """What became of one attempt at a shard; ``reason`` is None when its result was taken."""

    worker: str
    reason: str | None
    failure: TaskFailed | None = None


def new_round(setup: RunSetup, shards: int, buckets: Sequence[Bucket], pool: Pool) -> Round:
    """A round of so many shards, which become one gradient as the run wants it."""
    aggregation = setup.aggregation
    return Round(shards, buckets, pool, None if isinstance(aggregation, Mean) else aggregation)


class Collector:
    """Gathers the shards of one step after the other.

    Args:
        roster: the run's workers.
        keeper: has what they remember handed over.
        republish: writes the current parameters again, when the server for them has lost them.
    """

    def __init__(
        self,
        setup: RunSetup,
        client: Client,
        observers: Observers,
        task: GradientTask,
        layout: FlatLayout,
        roster: Roster,
        keeper: Keeper,
        republish: Callable[[], Awaitable[Part]],
    ) -> None:
        self.setup = setup
        self.client = client
        self.observers = observers
        self.task = task
        self.layout = layout
        self.republish = republish
        self.buckets = cut(layout, whole=setup.compression.takes_whole_parameters)
        self.pool = Pool(layout.parameter_count, KEPT_ARRAYS)
        self.roster = roster
        self.keeper = keeper
        self._gathering: _Gathering | None = None

    async def gather(
        self, plan: Plan, version: int, parameters: Part, update: Part | None = None
    ) -> Gathered:
        """Publish a step's shards and collect them.

        Args:
            update: what leads to the version's parameters, where they do not travel.

        Raises:
            MemoryGone: what the compression of a shard remembered is lost; the run is to go back to a checkpoint.
            TrainingError: a shard's handler raised again and again; the message holds the remote traceback.
        """
        gathering = self._gathering = _Gathering(self, plan, version, parameters, update)
        try:
            return await gathering.run()
        except MemoryGone:
            gathering.release()
            raise
        finally:
            self._gathering = None
            await gathering.clean_up()

    async def listen(self) -> None:
        """Hear of pieces of gradients, for ever."""
        await notes.listen(self.client.bulk, self.setup.keys.notes, self._hear)

    def _hear(self, note: Note) -> None:
        if self._gathering is not None:
            self._gathering.hear(note)


class _Gathering:
    """One step's round."""

    def __init__(
        self, collector: Collector, plan: Plan, version: int, parameters: Part, update: Part | None
    ) -> None:
        self._collector = collector
        self._setup = collector.setup
        self._plan = plan
        self._version = version
        self._parameters = parameters
        self._update = update
        self._round = new_round(self._setup, len(plan.shards), collector.buckets, collector.pool)
        self._handles: list[tuple[int, Handle[ShardResult]]] = []
        self._ended: set[str] = set()
        self._shares: list[Share] = []
        self._uplink_bytes = 0
        self._chunks = 0  # of the largest payload that came in chunks
        self._seats: dict[int, Seat] = {}
        self._anew: list[int] = []
        self._moved: dict[int, int] = {}
        self._receipts = Receipts(
            collector.client.bulk,
            functools.partial(self._setup.keys.gradient, version),
            self._round,
            collector.buckets,
            collector.layout,
            self._setup.compression,
        )

    async def run(self) -> Gathered:
        shards = {
            asyncio.create_task(self._shard(shard), name=f"taskmesh shard {shard}"): shard
            for shard in range(len(self._plan.shards))
        }
        waiting = set(shards)
        fault: str | None = None
        try:
            while waiting and fault is None:
                done, waiting = await asyncio.wait(
                    waiting, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
                )
                fault = next((reason for task in done if (reason := task.result()) is not None), None)
                if not done:
                    await self._tell_what_is_waited_for(sorted(shards[task] for task in waiting))
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*shards, return_exceptions=True)
            await self._receipts.close()
        shares, anew = tuple(sorted(self._shares)), tuple(sorted(self._anew))
        return Gathered(self._round, fault, shares, self._uplink_bytes, self._seats, anew, self._moved)

    async def _tell_what_is_waited_for(self, shards: list[int]) -> None:
        workers = await self._collector.roster.live_workers()
        log.warning(
            "run %s, step %d: waiting for shards %s of %d; %s serves queue %r",
            self._setup.name,
            self._plan.step,
            shards,
            len(self._plan.shards),
            f"{len(workers)} workers alive:" if workers else "no worker",
            self._setup.name,
        )

    async def _shard(self, shard: int) -> str | None:
        """Have one shard computed until its result can be used; else why that cannot be."""
        plan, bound = self._plan, self._setup.divergence.recomputes
        roster = self._collector.roster
        seat = roster.seat_of(shard)
        order = ShardOrder(
            self._version,
            plan.step,
            shard,
            plan.shards[shard],
            plan.lengths[shard],
            self._parameters,
            self._collector.layout.digest,
            self._setup.agreement,
            self._setup.fingerprint,
            roster.quarantined,
            seat.holder,
            seat.memory,
            seat.kept,
            self._update,
        )
        if seat.holder in roster.quarantined:
            order = await self._release(order)
        offenders: list[str] = []
        while True:
            answer = await self._ask(order)
            if answer.reason is None:
                for offender in filter(None, offenders):
                    if offender != answer.worker:
                        roster.note_offence(offender)
                return None
            offenders.append(answer.worker)
            if answer.failure is not None and len(offenders) > bound:
                raise TrainingError(
                    f"run {self._setup.name!r}, step {plan.step}: shard {shard} failed {len(offenders)} times: "
                    f"{answer.failure}\n{answer.failure.traceback}"
                ) from answer.failure
            self._refuse(order, answer.worker, answer.reason)
            if len(offenders) > bound:
                return f"shard {shard} was refused {len(offenders)} times: {answer.reason}"
            others = {*roster.quarantined, *filter(None, offenders)}
            order = dataclasses.replace(order, avoid=tuple(sorted(others)))
            if order.holder in others:
                order = await self._release(order)

    async def _ask(self, order: ShardOrder) -> _Answer:
        """Submit an order until a worker takes it up, and put its result into the round if it can be used."""
        declines = republications = 0
        roster = self._collector.roster
        while True:
            handle = await when_there_is_room(
                functools.partial(self._submit, order, declines), f"run {self._setup.name}"
            )
            self._handles.append((order.shard, handle))
            try:
                result = await roster.answer(handle, order.holder)
            except TaskFailed as error:
                return _Answer("", str(error), error)
            except (ResultUnavailable, TaskCancelled) as error:
                return _Answer("", str(error))
            if result is None:  # the holder is gone; it may have handed over what it remembered
                order = dataclasses.replace(order, holder="")
                continue
            self._ended.add(handle.id)
            if result.status == "declined":
                declines += 1
                if not await roster.has_others(order.avoid):
                    order, declines = dataclasses.replace(order, avoid=roster.unlike), 0
            elif result.status == "unlike":
                declines += 1
                roster.note_unlike(result.worker, result.reason)
                order = dataclasses.replace(order, avoid=tuple({*order.avoid, *roster.unlike}))
            elif result.status == "forgot":
                raise MemoryGone(roster.seat_of(order.shard).holder, [order.shard], result.reason)
            elif result.status == "gone" and republications < MAX_REPUBLICATIONS:
                republications += 1
                parameters = await self._collector.republish()
                order = dataclasses.replace(
                    order, parameters=parameters, update=None if parameters.kept else order.update
                )
            else:
                return _Answer(result.worker, await self._take(order, handle, result))

    async def _release(self, order: ShardOrder) -> ShardOrder:
        """Let others than its holder compute a shard: they find what its compression remembered."""
        await self._collector.keeper.hand_over(order.shard, Seat(order.holder, order.memory))
        return dataclasses.replace(order, holder="")

    async def _submit(self, order: ShardOrder, declines: int) -> Handle[ShardResult]:
        if not declines:
            return await self._collector.task.submit(order)
        # An idle worker that is avoided would take it again at once.
        delay = min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (declines - 1))
        return await self._collector.task.submit_in(delay, order)

    def _refuse(self, order: ShardOrder, worker: str, reason: str) -> None:
        name = self._setup.name
        log.warning(
            "run %s, step %d: shard %d of %s is refused: %s", name, order.step, order.shard, worker, reason
        )
        self._collector.observers.emit(ShardRefused(name, order.step, order.shard, worker, reason))

    async def _take(self, order: ShardOrder, handle: Handle[ShardResult], result: ShardResult) -> str | None:
        """Put a result into the round; else why it is refused."""
        if result.status != "computed":
            return result.reason
        shard = order.shard
        self._chunks = max(self._chunks, len(result.digests))
        fault = await self._receipts.take(shard, result)
        if fault is None:
            self._shares.append(Share(shard, result.worker, handle.id, len(self._plan.shards[shard])))
            if result.remembers:
                self._seats[shard] = Seat(result.worker, result.attempt)
                if not order.memory:
                    self._anew.append(shard)
                if result.moved_bytes:
                    self._moved[shard] = result.moved_bytes
            self._uplink_bytes += sum(result.sizes)
        return fault

    def release(self) -> None:
        """What came in is not wanted any more."""
        self._round.release()

    def hear(self, note: Note) -> None:
        """Pieces of a gradient are there."""
        if note.version == self._version and note.shard < len(self._plan.shards):
            self._receipts.hear(note.shard, note.attempt, note.places)

    def _gradient_keys(self, shard: int, attempt: str, count: int) -> list[bytes]:
        return [self._setup.keys.gradient(self._version, shard, attempt, place) for place in range(count)]

    async def clean_up(self) -> None:
        """Remove the records and gradients of all attempts; what comes later still goes with its time to live."""
        client = self._collector.client
        unfinished = [handle for _, handle in self._handles if handle.id not in self._ended]
        await asyncio.gather(*(handle.cancel() for handle in unfinished), return_exceptions=True)
        records = [
            client.partition(self._setup.name, partition_of(handle.id)).keys.result(handle.id)
            for _, handle in self._handles
        ]
        await chunks.unlink(client.caller, records)
        gradients = [
            key
            for shard, handle in self._handles
            for delivery in range(1, MAX_DELIVERIES + 1)
            for key in self._gradient_keys(shard, f"{handle.id}.{delivery}", self._chunks)
        ]
        await chunks.unlink(client.bulk, gradients)
