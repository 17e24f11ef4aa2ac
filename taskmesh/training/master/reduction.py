"""The master's side of a sharded reduce: it has ranges of a step's gradient reduced by workers, and fetches the means.

The shards' results come to the master as ever, with what is small: losses, counts and buffers. Their gradients it
leaves where they are. When all shards are there, each range goes out as a task of its own, and what comes back is put
into the memory of the step's gradient. A shard whose pieces cannot be used is named by whoever finds that out.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import socket
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from taskmesh.app.client import Client
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import checksum_of
from taskmesh.errors import ResultUnavailable, TaskCancelled, TaskFailed, TrainingError
from taskmesh.keys import partition_of, tag_of
from taskmesh.results.handle import Handle
from taskmesh.tasks import MAX_DELIVERIES
from taskmesh.training.buckets import Bucket
from taskmesh.training.master.roster import Roster, pause_after
from taskmesh.training.orders import GRADIENT_TTL_MS, ShardResult
from taskmesh.training.ranges import ReduceOrder, ReduceResult, cut_ranges, pays, pieces_of
from taskmesh.training.robust import Mean
from taskmesh.training.room import when_there_is_room
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.aggregate import Pool, Round, Values

log = logging.getLogger("taskmesh.training")
PATIENCE = 10.0


class ReduceTask(Protocol):
    """The run's reduce task, as far as it is used here."""

    async def submit_in(self, delay: float, order: ReduceOrder, /) -> Handle[ReduceResult]: ...

    async def submit(self, order: ReduceOrder, /) -> Handle[ReduceResult]: ...


class ReducedRound(Round):
    """A round whose gradient is reduced elsewhere, and put into ``gradient``."""

    def __init__(self, shards: int, pool: Pool) -> None:
        super().__init__(shards, (), pool)
        self.gradient = pool.take()

    def prepare(self, shard: int) -> None:
        self._memory[shard] = self.gradient  # of whichever shard it is taken

    def has(self, shard: int, bucket: int) -> bool:
        """No piece of a gradient is wanted here."""
        return True

    def release(self) -> None:
        if self._memory:
            self._memory.clear()
            self._pool.give(self.gradient)


class Reducers:
    """Decides step by step who reduces its gradient."""

    def __init__(
        self,
        setup: RunSetup,
        client: Client,
        task: ReduceTask,
        roster: Roster,
        buckets: tuple[Bucket, ...],
        pool: Pool,
    ) -> None:
        self.setup = setup
        self.client = client
        self.task = task
        self.roster = roster
        self.buckets = buckets
        self.pool = pool
        self._is_worth_it = False

    def begin(self, version: int, step: int, shards: int) -> Reduction | None:
        """The reduction of a step by workers; None where the master does it."""
        choice = self.setup.reduce
        if choice == "master" or (choice == "auto" and not self._is_worth_it):
            return None
        return Reduction(self, version, step, shards)

    def note(self, uplink_bytes: int, workers: Iterable[str]) -> None:
        """What a step's shards sent, and who computed them: by that the next step is decided."""
        if self.setup.reduce != "auto" or self.setup.is_asynchronous:
            return
        if not isinstance(self.setup.aggregation, Mean):
            return  # a worker that computes nonsense, which the others withstand, is not to reduce
        hosts = {worker.rsplit("-", 2)[0] for worker in workers} - {socket.gethostname()}
        dense_bytes = 4 * sum(bucket.size for bucket in self.buckets)
        was, self._is_worth_it = self._is_worth_it, pays(uplink_bytes, dense_bytes, self._nodes(), len(hosts))
        if was != self._is_worth_it:
            who = "workers" if self._is_worth_it else "the master"
            log.info("run %s: gradients are reduced by %s from now on", self.setup.name, who)

    def _nodes(self) -> int:
        """Servers that a step's gradients are spread over."""
        server = self.client.bulk.server
        if not server.is_cluster:
            return 1
        keys = [self.setup.keys.gradient(0, shard, "", 0) for shard in range(self.setup.shards)]
        return len({server.node(tag_of(key)) for key in keys})


class _Answer(NamedTuple):
    """What became of one attempt at a range.

    Attributes:
        fault: why it is to be reduced again; None when it is done, or when shards are refused.
    """

    worker: str
    fault: str | None = None
    refused: tuple[tuple[int, str], ...] = ()
    failure: TaskFailed | None = None


class Reduction:
    """One step's.

    Attributes:
        round: what the shards' results are put into; the gradient, once ``bring`` has brought all of it.
    """

    def __init__(self, reducers: Reducers, version: int, step: int, shards: int) -> None:
        self.round = ReducedRound(shards, reducers.pool)
        self._reducers = reducers
        self._setup = reducers.setup
        self._version = version
        self._step = step
        self._shards = shards
        self._left: list[range] | None = None
        self._handles: list[tuple[range, Handle[ReduceResult]]] = []
        self._ended: set[str] = set()
        self._written: list[bytes] = []

    async def bring(self, results: Mapping[int, ShardResult]) -> dict[int, str]:
        """Have what is left of the gradient reduced, and fetch it.

        Args:
            results: of all the shards that are in the step.

        Returns:
            The shards whose pieces cannot be used, with the reasons; none when the gradient is whole.

        Raises:
            TrainingError: workers fail at it again and again; the message says how.
        """
        lying = {shard: await self._lay_out(shard, results[shard]) for shard in sorted(results)}
        if self._left is None:
            workers = {result.worker for result in lying.values()}
            self._left = cut_ranges(self._reducers.buckets, len(workers))
        tasks = {
            asyncio.create_task(self._reduce(places, lying), name="taskmesh range"): places
            for places in self._left
        }
        try:
            await self._wait(tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        found = {places: task.result() for task, places in tasks.items()}
        self._left = [places for places, refused in found.items() if refused]
        return {shard: reason for refused in found.values() for shard, reason in refused}

    async def _wait(self, tasks: Iterable[asyncio.Task[tuple[tuple[int, str], ...]]]) -> None:
        """For all of them, or for the first that fails."""
        waiting = set(tasks)
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=PATIENCE, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if not done:
                log.warning(
                    "run %s, step %d: waiting for %d ranges of its gradient to be reduced",
                    self._setup.name,
                    self._step,
                    len(waiting),
                )

    async def _lay_out(self, shard: int, result: ShardResult) -> ShardResult:
        """A payload that rode in its result is put where the large ones lie."""
        if result.digests:
            return result
        keys = [
            self._setup.keys.gradient(self._version, shard, result.attempt, place)
            for place in range(len(result.sizes))
        ]
        data, pieces = memoryview(result.inline), []
        for size in result.sizes:
            pieces.append(data[:size])
            data = data[size:]
        self._written += keys
        await when_there_is_room(
            lambda: chunks.put(self._reducers.client.bulk, keys, pieces, GRADIENT_TTL_MS),
            f"run {self._setup.name}",
        )
        return dataclasses.replace(result, digests=tuple(map(checksum_of, pieces)))

    async def _reduce(self, places: range, results: Mapping[int, ShardResult]) -> tuple[tuple[int, str], ...]:
        """Have one range reduced until it is here; else the shards that cannot be used."""
        roster = self._reducers.roster
        order = ReduceOrder(
            self._version,
            self._step,
            self._shards,
            places.start,
            self._reducers.buckets[places.start : places.stop],
            tuple(pieces_of(shard, result, places) for shard, result in results.items()),
            self._setup.agreement,
            roster.quarantined,
        )
        offenders: list[str] = []
        while True:
            answer = await self._ask(places, order)
            if answer.fault is None:
                for offender in filter(None, offenders):
                    if offender != answer.worker:
                        roster.note_offence(offender)
                return answer.refused
            offenders.append(answer.worker)
            self._check_bound(len(offenders), answer)
            log.warning(
                "run %s, step %d: a range reduced by %s is refused: %s",
                self._setup.name,
                self._step,
                answer.worker or "a worker",
                answer.fault,
            )
            others = {*roster.quarantined, *filter(None, offenders)}
            order = dataclasses.replace(order, avoid=tuple(sorted(others)))

    def _check_bound(self, failures: int, answer: _Answer) -> None:
        if failures <= self._setup.divergence.recomputes:
            return
        trace = "" if answer.failure is None else f"\n{answer.failure.traceback}"
        raise TrainingError(
            f"run {self._setup.name!r}, step {self._step}: a range of its gradient could not be reduced by workers in "
            f"{failures} attempts: {answer.fault}{trace}"
        ) from answer.failure

    async def _ask(self, places: range, order: ReduceOrder) -> _Answer:
        """Submit an order until a worker takes it up, and fetch what it has reduced."""
        declines = 0
        while True:
            handle = await when_there_is_room(
                functools.partial(self._submit, order, declines), f"run {self._setup.name}"
            )
            self._handles.append((places, handle))
            try:
                result = await handle.result()
            except TaskFailed as error:
                return _Answer("", str(error), failure=error)
            except (ResultUnavailable, TaskCancelled) as error:
                return _Answer("", str(error))
            self._ended.add(handle.id)
            if result.status == "reduced":
                return _Answer(result.worker, await self._fetch(order, result))
            if result.status == "refused":
                return _Answer(result.worker, refused=result.refused)
            declines += 1
            if not await self._reducers.roster.has_others(order.avoid):
                order, declines = dataclasses.replace(order, avoid=()), 0

    async def _submit(self, order: ReduceOrder, declines: int) -> Handle[ReduceResult]:
        task = self._reducers.task
        return await (task.submit_in(pause_after(declines), order) if declines else task.submit(order))

    async def _fetch(self, order: ReduceOrder, result: ReduceResult) -> str | None:
        """Bring a reduced range into the gradient; why it is not there, if so."""
        arrived: set[int] = set()

        def memory(at: int) -> memoryview:
            bucket = order.buckets[at]
            values: Values = self.round.gradient[bucket.start : bucket.stop]
            return values.data.cast("B")

        def target(at: int, size: int) -> memoryview | None:
            return memory(at) if size == 4 * order.buckets[at].size else None

        def taken(at: int) -> None:
            if checksum_of(memory(at)) == result.digests[at]:
                arrived.add(at)

        if len(result.digests) != len(order.buckets):
            return f"{len(result.digests)} pieces; the range has {len(order.buckets)}"
        await chunks.get(
            self._reducers.client.bulk,
            self._keys(range(order.first, order.first + len(order.buckets)), result.attempt),
            target,
            taken,
            4 * sum(bucket.size for bucket in order.buckets),
        )
        return None if len(arrived) == len(order.buckets) else "a piece of it is gone or corrupt"

    def _keys(self, places: range, attempt: str) -> list[bytes]:
        return [self._setup.keys.reduced(self._version, attempt, place) for place in places]

    async def clean_up(self) -> None:
        """Remove the records and pieces of all attempts; what comes later still goes with its time to live."""
        client = self._reducers.client
        unfinished = [handle for _, handle in self._handles if handle.id not in self._ended]
        await asyncio.gather(*(handle.cancel() for handle in unfinished), return_exceptions=True)
        records = [
            client.partition(self._setup.name, partition_of(handle.id)).keys.result(handle.id)
            for _, handle in self._handles
        ]
        await chunks.unlink(client.caller, records)
        reduced = [
            key
            for places, handle in self._handles
            for delivery in range(1, MAX_DELIVERIES + 1)
            for key in self._keys(places, f"{handle.id}.{delivery}")
        ]
        await chunks.unlink(client.bulk, [*reduced, *self._written])
