"""The master of a run: plan -> publish -> collect -> decide -> aggregate -> commit.

It lives in one process at a time, under the run's lease; all that it needs to go on is in the run's checkpoints, so
that any process may take its place.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import socket
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from taskmesh.checkpoints.manifest import Manifest, is_whole
from taskmesh.checkpoints.tables import memory_name
from taskmesh.errors import CheckpointError, TaskmeshError, TrainingError
from taskmesh.events import Committed, MemoryMoved, Observers, ShardsLate
from taskmesh.training.compute import compute
from taskmesh.training.data import Sampler
from taskmesh.training.host import HostMemory
from taskmesh.training.ledger import LedgerEntry
from taskmesh.training.master import saver
from taskmesh.training.master.collect import Collector, Gathered
from taskmesh.training.master.commit import Committer
from taskmesh.training.master.returns import Returns
from taskmesh.training.master.rounds import Ready, Rounds, Source
from taskmesh.training.master.stream import Stream
from taskmesh.training.master.validator import Validator
from taskmesh.training.memory import MemoryGone, pack
from taskmesh.training.modes import Asynchronous
from taskmesh.training.plan import Owed, Plan
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.aggregate import Update
from taskmesh.training.step.learner import Learner, scale_of
from taskmesh.training.step.progress import Point, Progress

R = TypeVar("R")
log = logging.getLogger("taskmesh.training")


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run stands when ``run`` returns.

    Attributes:
        loss: of the last step; NaN when none was ever taken.
        digest: of the parameters' bytes: equal for two runs exactly when the parameters are.
        skipped: batches that were left out, by number.
        owed: shards of batches drawn so far that were late; they enter the next steps, when the run goes on.
    """

    version: int
    step: int
    loss: float
    digest: str
    skipped: tuple[int, ...]
    owed: tuple[Owed, ...] = ()


class _Dropped(NamedTuple):
    """A metric has dropped, and how."""

    reason: str


class Master:
    """Takes the steps of one run.

    Attributes:
        progress: where the run stands.
    """

    def __init__(
        self,
        setup: RunSetup,
        sampler: Sampler,
        learner: Learner,
        committer: Committer,
        collector: Collector,
        observers: Observers,
        host: HostMemory,
        validator: Validator | None = None,
    ) -> None:
        self._setup = setup
        self._sampler = sampler
        mode = setup.mode
        self._source: Source = (
            Stream(setup, sampler, committer, collector, mode.staleness)
            if isinstance(mode, Asynchronous)
            else Rounds(setup, sampler, committer, collector)
        )
        self._learner = learner
        self._committer = committer
        self._collector = collector
        self._observers = observers
        self._host = host
        self._validator = validator
        self.progress = Progress()
        self._is_between_steps = True  # else the learner's parameters are not the current version's
        self._returns = Returns(setup, sampler, committer, collector.dispatch.roster, observers)
        self._requests: list[tuple[int, asyncio.Future[int]]] = []

    async def run(self, steps: int, on_commit: Callable[[Committed], None] | None = None) -> Finished:
        """Go on until the run has seen ``steps`` updates.

        Raises:
            LeadershipLost: another master leads the run.
            TrainingError: it cannot go on, or not to the same bits.
            CheckpointError: there is no whole checkpoint to go on from, or back to.
        """
        await self.resume()
        self._committer.hold_fingerprint()
        while (current := await self._go_on(steps, on_commit)) is None:
            pass  # a worker was lost with what it remembered: some of the steps are taken again
        digest = current.parts["parameters"].root.hex()
        loss = current.metrics.get("loss", float("nan"))
        return Finished(current.version, current.step, loss, digest, current.skipped, self.progress.owed)

    async def _go_on(self, steps: int, on_commit: Callable[[Committed], None] | None) -> Manifest | None:
        """Take steps until there are so many, and keep the last; None when the run had to go back for a lost worker."""
        try:
            await self._take_steps(steps, on_commit)
            return await self._committer.end()
        except MemoryGone as gone:
            self._is_between_steps = False
            self.progress = await self._returns.for_lost(gone, self.progress)
            self._is_between_steps = True
            return None

    async def _take_steps(self, steps: int, on_commit: Callable[[Committed], None] | None) -> None:
        try:
            while True:
                await self._serve_requests()
                if self.progress.step >= steps:
                    break
                committed = await self._take_step()
                if committed is not None and on_commit is not None:
                    on_commit(committed)
        except asyncio.CancelledError:
            await self._source.stop()
            await self._keep_where_it_is()
            raise
        finally:
            await self._source.stop()

    async def _keep_where_it_is(self) -> None:
        """Asked to stop: no step that was taken is lost, where there is time to keep it."""
        if self._is_between_steps:
            try:
                async with asyncio.timeout(saver.STOP_PATIENCE):
                    await self._committer.end()
            except (TaskmeshError, TimeoutError) as error:
                log.warning("run %s: its last steps are not kept: %s", self._setup.name, error)

    async def _take_step(self) -> Committed | None:
        """One step; None when it ended in a rollback."""
        started = time.monotonic()
        ready = await self._source.next(self.progress)
        try:
            outcome: Committed | _Dropped | str | None = self._decide(ready.gathered)
            if outcome is None:
                outcome = await self._to_its_end(self._apply_and_commit(ready, started))
        finally:
            ready.gathered.round.release()
        if isinstance(outcome, Committed):
            return outcome
        self._is_between_steps = False
        await self._source.stop()
        if isinstance(outcome, _Dropped):
            self.progress = await self._returns.after_drop(ready, outcome.reason, self.progress)
        else:
            self.progress = await self._returns.after(ready, outcome)
        self._is_between_steps = True
        return None

    async def _apply_and_commit(self, ready: Ready, started: float) -> Committed | _Dropped | str:
        """Take the step that the gradients make; else why it must not be taken."""
        self._is_between_steps = False
        update, step = ready.gathered.round.update(), ready.progress.step
        reason = await compute(self._learner.apply, update, step, scale_of(ready.staleness))
        if reason is not None:
            return reason
        value = await self._validate(step)
        if value is not None and (reason := self._judge(value)) is not None:
            return _Dropped(reason)
        committed = await self._commit(ready, update, value, started)
        self._is_between_steps = True
        return committed

    async def _to_its_end(self, work: Coroutine[Any, Any, R]) -> R:
        """Do something that is worth its end even when the run is asked to stop meanwhile: so the step is kept."""
        working = asyncio.create_task(work, name="taskmesh step")
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            await asyncio.wait({working}, timeout=saver.STOP_PATIENCE)
            working.cancel()
            (outcome,) = await asyncio.gather(working, return_exceptions=True)
            if isinstance(outcome, Exception):
                log.warning("run %s: its last step is not kept: %s", self._setup.name, outcome)
            raise

    def _decide(self, gathered: Gathered) -> str | None:
        """Why the step must not be taken; None when it may."""
        if gathered.fault is not None:
            return gathered.fault
        if not gathered.round.count:
            return "no sample of the batch counts"
        return self._setup.divergence.judge(gathered.round.loss, self.progress.losses)

    async def _validate(self, step: int) -> float | None:
        """The metric of the parameters as they are, where it is due."""
        if self._validator is None or not self._validator.is_due(step):
            return None
        return await self._validator.measure(self._learner.flat.view(), step)

    def _judge(self, value: float) -> str | None:
        """Why a version of this metric must not be committed; None when it may."""
        assert self._validator is not None
        return self._validator.judge(value, self.progress.validation)

    async def _commit(self, ready: Ready, update: Update, value: float | None, started: float) -> Committed:
        plan, gathered = ready.plan, ready.gathered
        losses = self.progress.losses.add(update.loss, self._setup.divergence.window)
        progress = replace(ready.progress, losses=losses)
        metrics = {"loss": update.loss}
        if self._validator is not None and value is not None and math.isfinite(value):
            metrics[self._validator.name] = value
            validation = progress.validation.add(value, progress.step, progress.drawn)
            progress = replace(progress, validation=validation)
        self._collector.dispatch.roster.take_seats(gathered.seats)
        assert self._committer.current is not None
        version, parent = self._committer.version + 1, self._committer.current.version
        await self._committer.commit(
            progress,
            metrics,
            self._sampler.samples,
            LedgerEntry(
                version,
                parent,
                progress.step,
                plan.batch,
                tuple(map(len, plan.shards)),
                gathered.shares,
                gathered.anew,
                extra=plan.extra,
                owed=progress.owed,
                base=ready.base,
                drawn=progress.drawn,
            ),
        )
        self.progress = progress
        self._tell_of_moves(plan.step, gathered)
        if gathered.late:
            self._tell_of_late_shards(plan, gathered.late)
        await self._offer(gathered)
        dense_bytes = 4 * self._learner.flat.layout.float_count * len(gathered.shares)
        seconds = time.monotonic() - started
        event = Committed(
            self._setup.name,
            version,
            progress.step,
            update.loss,
            seconds,
            gathered.uplink_bytes,
            dense_bytes,
            (self._committer.update or self._committer.parameters).size_bytes,
            metrics,
            sum(share.samples for share in gathered.shares),
            self._learner.rate,
            self._learner.norm,
        )
        self._observers.emit(event)
        return event

    def _tell_of_late_shards(self, plan: Plan, late: tuple[int, ...]) -> None:
        samples, owed = sum(len(plan.shards[shard]) for shard in late), len(self.progress.owed)
        log.info(
            "run %s, step %d: taken without shards %s; their %d samples enter later steps; %d shards are owed",
            self._setup.name,
            plan.step,
            list(late),
            samples,
            owed,
        )
        self._observers.emit(ShardsLate(self._setup.name, plan.step, late, samples, owed))

    async def _offer(self, gathered: Gathered) -> None:
        """Let the workers on this machine have the parameters without a fetch."""
        here = f"{socket.gethostname()}-"
        if any(share.worker.startswith(here) for share in gathered.shares):
            part = self._committer.parameters
            await self._host.offer(part.root, self._learner.flat.view(), functools.partial(is_whole, part))

    def request_rollback(self, version: int) -> asyncio.Future[int]:
        """Go back to a kept version before the next step; resolves with the new version."""
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._requests.append((version, future))
        return future

    async def _serve_requests(self) -> None:
        while self._requests:
            version, future = self._requests.pop(0)
            try:
                reached = await self.roll_back_to(version)
            except asyncio.CancelledError:
                self._requests.append((version, future))
                self.close()
                raise
            except Exception as error:
                if not future.done():
                    future.set_exception(error)
                if not isinstance(error, CheckpointError):
                    raise  # the learner may hold the old version already: a master that begins again knows
            else:
                if not future.done():
                    future.set_result(reached)

    def close(self) -> None:
        """Answer those who asked for a rollback that does not come any more."""
        while self._requests:
            _, future = self._requests.pop()
            if not future.done():
                future.set_exception(
                    TrainingError(f"run {self._setup.name!r} has ended before it could be rolled back")
                )

    async def roll_back_to(self, version: int) -> int:
        """Make a kept version current, as a new version, whose number is returned.

        Raises:
            CheckpointError: it is not kept (any more), or damaged.
        """
        await self._source.stop()
        self._is_between_steps = False
        self.progress = await self._returns.to(version)
        self._is_between_steps = True
        return self._committer.version

    async def adopt(self, point: Point, without: str, parent: int, since: int) -> int:
        """Make a state that was formed without one worker's contributions current, as a new version; its number."""
        progress = point.progress.leave_out(self.progress.skipped)
        await compute(self._learner.restore, point.parameters, point.state)
        losses = progress.losses.recent
        entry = LedgerEntry(
            self._committer.version + 1, parent, progress.step, -1, without=without, since=since
        )
        metrics = {"loss": losses[-1]} if losses else {}
        memories = {memory_name(shard): pack(state) for shard, state in point.memories.items() if state}
        await self._committer.adopt(progress, metrics, self._sampler.samples, entry, memories)
        self.progress = progress
        log.info(
            "run %s: version %d is version %d formed again without worker %s",
            self._setup.name,
            self._committer.version,
            parent,
            without,
        )
        return self._committer.version

    async def resume(self) -> None:
        """Take the run up without going on."""
        self.progress = await self._committer.begin(self._sampler.samples)
        self._collector.dispatch.roster.resume_seats(self._committer.checkpoint)

    def _tell_of_moves(self, step: int, gathered: Gathered) -> None:
        if gathered.moved:
            shards, size_bytes = tuple(sorted(gathered.moved)), sum(gathered.moved.values())
            log.info(
                "run %s, step %d: what the compression of shards %s remembers went to other workers (%d bytes)",
                self._setup.name,
                step,
                list(shards),
                size_bytes,
            )
            self._observers.emit(MemoryMoved(self._setup.name, step, shards, size_bytes))
