"""A step's shards: published, collected, refused where they are unusable, and computed again.

A shard comes from whatever worker computes it; the death of one is the engine's business (redelivery). Here it is
decided whether a result can be used. What is refused (not finite, damaged, a handler that raised) goes out again a
bounded number of times, to others where there are others. Results of earlier steps find nobody who waits for them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import TaskFailed, TrainingError
from taskmesh.events import ShardRefused
from taskmesh.results.handle import Handle
from taskmesh.tensors import FlatLayout
from taskmesh.training import notes
from taskmesh.training.buckets import cut
from taskmesh.training.ledger import Share
from taskmesh.training.master.attempts import Attempts, Dispatch
from taskmesh.training.master.reduction import Reducers, ReduceTask
from taskmesh.training.master.roster import PATIENCE, Seat
from taskmesh.training.memory import MemoryGone
from taskmesh.training.notes import Note
from taskmesh.training.orders import ShardFailed, ShardOrder, ShardResult
from taskmesh.training.plan import Plan
from taskmesh.training.step.aggregate import Pool, Round, new_round
from taskmesh.training.step.receive import Receipts

log = logging.getLogger("taskmesh.training")


class Gathered(NamedTuple):
    """What a round came to.

    Attributes:
        fault: why the step cannot be taken; None when all shards are there, or enough of them.
        uplink_bytes: payloads that came in and were used: compressed gradients with their heads, and buffers.
        seats: who holds which shard once the step is taken.
        anew: the shards whose compression remembers, and began with nothing.
        moved: bytes of what other workers had remembered and handed over, by shard.
        late: the shards that were not waited for.
    """

    round: Round
    fault: str | None
    shares: tuple[Share, ...]
    uplink_bytes: int
    seats: Mapping[int, Seat]
    anew: tuple[int, ...]
    moved: Mapping[int, int]
    late: tuple[int, ...] = ()


class Collector:
    """Gathers the shards of one step after the other.

    Args:
        reduce_task: reduces ranges of gradients, where workers are to do that.
    """

    def __init__(self, dispatch: Dispatch, reduce_task: ReduceTask, layout: FlatLayout) -> None:
        setup = dispatch.setup
        self.dispatch = dispatch
        self.layout = layout
        self.buckets = cut(layout, whole=setup.compression.takes_whole_parameters)
        self.pool = Pool(layout.parameter_count)
        self.reducers = Reducers(
            setup, dispatch.client, reduce_task, dispatch.roster, self.buckets, self.pool
        )
        self._gatherings: set[_Gathering] = set()

    async def gather(
        self, plan: Plan, version: int, parameters: Part, update: Part | None = None
    ) -> Gathered:
        """Publish a step's shards and collect them.

        Args:
            update: what leads to the version's parameters, where they do not travel.

        Raises:
            MemoryGone: what the compression of a shard remembered is lost; the run is to go back to a checkpoint.
            TrainingError: a shard's handler raised again and again; the message holds the remote traceback.
            ParametersGone: in an asynchronous run, where the current parameters are others by then.
        """
        gathering = _Gathering(self, plan, version, parameters, update)
        self._gatherings.add(gathering)
        try:
            gathered = await gathering.run()
        except MemoryGone:
            gathering.release()
            raise
        finally:
            self._gatherings.discard(gathering)
            await gathering.clean_up()
        self.reducers.note(gathered.uplink_bytes, {share.worker for share in gathered.shares})
        return gathered

    async def listen(self) -> None:
        """Hear of pieces of gradients, for ever."""
        await notes.listen(self.dispatch.client.bulk, self.dispatch.setup.keys.notes, self._hear)

    def _hear(self, note: Note) -> None:
        for gathering in self._gatherings:
            gathering.hear(note)


class _Gathering:
    """One step's round."""

    def __init__(
        self, collector: Collector, plan: Plan, version: int, parameters: Part, update: Part | None
    ) -> None:
        self._collector = collector
        self._setup = collector.dispatch.setup
        self._plan = plan
        self._version = version
        self._parameters = parameters
        self._update = update
        self._reduction = collector.reducers.begin(version, plan.step, len(plan.shards))
        self._round = self._make_round()
        self._offenders: defaultdict[int, list[str]] = defaultdict(list)
        self._results: dict[int, ShardResult] = {}
        self._attempts = Attempts(collector.dispatch, version, self._take)
        self._shares: list[Share] = []
        self._uplink_bytes = 0
        self._chunks = 0  # of the largest payload that came in chunks
        self._seats: dict[int, Seat] = {}
        self._anew: list[int] = []
        self._moved: dict[int, int] = {}
        self._begun: set[int] = set()  # shards whose result is being put into the round, or is there
        self._late: set[int] = set()  # shards that are not waited for any more
        self._receipts = Receipts(
            collector.dispatch.client.bulk,
            lambda place, attempt, piece: self._setup.keys.gradient(
                version, plan.first + place, attempt, piece
            ),
            self._round,
            collector.buckets,
            collector.layout,
            self._setup.compression,
        )

    def _make_round(self) -> Round:
        if self._reduction is not None:
            return self._reduction.round
        collector = self._collector
        return new_round(self._setup, len(self._plan.shards), collector.buckets, collector.pool)

    async def run(self) -> Gathered:
        plan = self._plan
        # What is owed is taken up first.
        order = (*range(plan.own, len(plan.shards)), *range(plan.own))
        try:
            fault = await self._collect(order, self._setup.needed(plan.own) + len(plan.extra))
            while fault is None and self._reduction is not None:
                refused = await self._reduction.bring(self._results)
                if not refused:
                    break
                faults = [self._take_back(shard, reason) for shard, reason in refused.items()]
                fault = next(filter(None, faults), None) or await self._collect(refused, len(refused))
        finally:
            await self._receipts.close()
        shares, anew = tuple(sorted(self._shares)), tuple(sorted(self._anew))
        late = tuple(sorted(self._late))
        if fault is None:
            for shard in late:
                await asyncio.to_thread(self._round.leave_out, shard)
        return Gathered(self._round, fault, shares, self._uplink_bytes, self._seats, anew, self._moved, late)

    async def _collect(self, chosen: Iterable[int], needed: int) -> str | None:
        """Have shards computed until so many of them are there; else why one of them cannot be."""
        shards = {
            asyncio.create_task(self._shard(shard), name=f"taskmesh shard {shard}"): shard for shard in chosen
        }
        watching = asyncio.create_task(self._attempts.watch(), name="taskmesh backups")
        waiting = set(shards)
        fault: str | None = None
        try:
            while waiting and fault is None:
                done, waiting = await asyncio.wait(
                    waiting, timeout=PATIENCE, return_when=asyncio.FIRST_COMPLETED
                )
                fault = next((reason for task in done if (reason := task.result()) is not None), None)
                if len(shards) - len(waiting) >= needed:
                    waiting -= self._let_go({task: shards[task] for task in waiting})
                elif not done:
                    await self._tell_what_is_waited_for(sorted(shards[task] for task in waiting))
        finally:
            for task in (*shards, watching):
                task.cancel()
            await asyncio.gather(*shards, watching, return_exceptions=True)
        return fault

    def _let_go(self, waiting: Mapping[asyncio.Task[str | None], int]) -> set[asyncio.Task[str | None]]:
        """Enough shards are there: wait for no others than those that are being added, which cannot be undone."""
        late = {task for task, shard in waiting.items() if shard not in self._begun}
        self._late.update(waiting[task] for task in late)
        for task in late:
            task.cancel()
        return late

    async def _tell_what_is_waited_for(self, shards: list[int]) -> None:
        workers = await self._collector.dispatch.roster.live_workers()
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
        roster, offenders = self._collector.dispatch.roster, self._offenders[shard]
        seat = roster.seat_of(shard)
        order = ShardOrder(
            self._version,
            plan.step,
            plan.first + shard,
            plan.shards[shard],
            plan.lengths[shard],
            self._parameters,
            self._collector.layout.digest,
            self._setup.agreement,
            self._setup.fingerprint,
            self._avoided(offenders),
            seat.holder,
            seat.memory,
            seat.kept,
            self._update,
        )
        if order.holder in order.avoid:
            order = await self._attempts.release(order)
        while True:
            answer = await self._attempts.first_answer(order)
            if answer.reason is None:
                for offender in filter(None, offenders):
                    if offender != answer.worker:
                        roster.note_offence(offender)
                return None
            offenders.append(answer.worker)
            if answer.failure is not None and len(offenders) > bound:
                raise TrainingError(
                    f"run {self._setup.name!r}, step {plan.step}: shard {shard} failed {len(offenders)} times, last on "
                    f"{answer.worker or 'a worker'}: {answer.failure}\n{_traceback_of(answer.failure)}"
                ) from answer.failure
            self._refuse(shard, answer.worker, answer.reason)
            if len(offenders) > bound:
                return f"shard {shard} was refused {len(offenders)} times: {answer.reason}"
            order = dataclasses.replace(order, avoid=self._avoided(offenders))
            if order.holder in order.avoid:
                order = await self._attempts.release(order)

    def _avoided(self, offenders: Iterable[str]) -> tuple[str, ...]:
        return tuple(sorted({*self._collector.dispatch.roster.quarantined, *filter(None, offenders)}))

    def _refuse(self, shard: int, worker: str, reason: str) -> None:
        name, step, number = self._setup.name, self._plan.step, self._plan.first + shard
        who = worker or "a worker"
        log.warning("run %s, step %d: shard %d of %s is refused: %s", name, step, number, who, reason)
        self._collector.dispatch.observers.emit(ShardRefused(name, step, number, worker, reason))

    def _take_back(self, shard: int, reason: str) -> str | None:
        """A result that was taken turned out to be unusable. Why it is not computed again, if so."""
        result = self._results.pop(shard)
        self._receipts.forget(shard)
        self._begun.discard(shard)
        self._shares = [share for share in self._shares if share.shard != shard]
        self._uplink_bytes -= sum(result.sizes)
        self._seats.pop(shard, None)
        self._moved.pop(shard, None)
        self._anew = [each for each in self._anew if each != shard]
        offenders = self._offenders[shard]
        offenders.append(result.worker)
        self._refuse(shard, result.worker, reason)
        if len(offenders) > self._setup.divergence.recomputes:
            return f"shard {shard} was refused {len(offenders)} times: {reason}"
        return None

    async def _take(self, order: ShardOrder, handle: Handle[ShardResult], result: ShardResult) -> str | None:
        """Put a result into the round; else why it is refused."""
        shard = order.shard - self._plan.first
        if result.status != "computed":
            return result.reason
        if shard in self._late:
            return "the step does not wait for it any more"
        self._begun.add(shard)
        self._chunks = max(self._chunks, len(result.digests))
        fault = await self._receipts.take(shard, result)
        if fault is None:
            self._shares.append(Share(order.shard, result.worker, handle.id, len(self._plan.shards[shard])))
            if result.remembers:
                self._seats[shard] = Seat(result.worker, result.attempt)
                if not order.memory:
                    self._anew.append(shard)
                if result.moved_bytes:
                    self._moved[shard] = result.moved_bytes
            self._uplink_bytes += sum(result.sizes)
            self._results[shard] = result
        elif not self._round.is_open(shard):
            self._begun.discard(shard)
        return fault

    def release(self) -> None:
        """What came in is not wanted any more."""
        self._round.release()

    def hear(self, note: Note) -> None:
        """Pieces of a gradient are there."""
        if self._reduction is not None:
            return
        place = note.shard - self._plan.first
        is_of_it = note.version == self._version and 0 <= place < len(self._plan.shards)
        if is_of_it and self._attempts.has(note.attempt):
            self._receipts.hear(place, note.attempt, note.places)

    async def clean_up(self) -> None:
        """Remove what all attempts have left."""
        await self._attempts.clean_up(self._chunks)
        if self._reduction is not None:
            await self._reduction.clean_up()


def _traceback_of(failure: ShardFailed | TaskFailed) -> str:
    """What a worker's handler left of where it failed."""
    remote = failure if isinstance(failure, TaskFailed) else failure.__cause__
    return remote.traceback if isinstance(remote, TaskFailed) else ""
