"""The master of a run: plan -> publish -> collect -> decide -> aggregate -> commit.

It lives in one process at a time, under the run's lease; all that it needs to go on is in the run's checkpoints, so
that any process may take its place.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from taskmesh.checkpoints.manifest import Manifest, is_whole
from taskmesh.checkpoints.tables import memory_name
from taskmesh.errors import CheckpointError, TaskmeshError, TrainingError
from taskmesh.events import Committed, MemoryMoved, Observers, RolledBack
from taskmesh.training import saver
from taskmesh.training.aggregate import Update
from taskmesh.training.collect import Collector, Gathered
from taskmesh.training.commit import Committer, Loaded
from taskmesh.training.compute import compute
from taskmesh.training.data import Sampler
from taskmesh.training.host import HostMemory
from taskmesh.training.learner import Learner
from taskmesh.training.ledger import LedgerEntry
from taskmesh.training.memory import MemoryGone, pack
from taskmesh.training.plan import Plan, make_plan
from taskmesh.training.progress import Progress
from taskmesh.training.replay import Point
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")
RETURNS = 20  # returns to one and the same checkpoint because workers were lost


@dataclass(frozen=True, slots=True)
class Finished:
    """How a run stands when ``run`` returns.

    Attributes:
        loss: of the last step; NaN when none was ever taken.
        digest: of the parameters' bytes: equal for two runs exactly when the parameters are.
        skipped: batches that were left out, by number.
    """

    version: int
    step: int
    loss: float
    digest: str
    skipped: tuple[int, ...]


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
    ) -> None:
        self._setup = setup
        self._sampler = sampler
        self._learner = learner
        self._committer = committer
        self._collector = collector
        self._observers = observers
        self._host = host
        self.progress = Progress()
        self._is_between_steps = True  # else the learner's parameters are not the current version's
        self._returns: Counter[int] = Counter()
        self._lost: Counter[int] = Counter()
        self._requests: list[tuple[int, asyncio.Future[int]]] = []

    async def run(self, steps: int, on_commit: Callable[[Committed], None] | None = None) -> Finished:
        """Go on until the run has seen ``steps`` updates.

        Raises:
            LeadershipLost: another master leads the run.
            TrainingError: it cannot go on.
            CheckpointError: there is no whole checkpoint to go on from, or back to.
        """
        await self.resume()
        while (current := await self._go_on(steps, on_commit)) is None:
            pass  # a worker was lost with what it remembered: some of the steps are taken again
        digest = current.parts["parameters"].root.hex()
        loss = current.metrics.get("loss", float("nan"))
        return Finished(current.version, current.step, loss, digest, current.skipped)

    async def _go_on(self, steps: int, on_commit: Callable[[Committed], None] | None) -> Manifest | None:
        """Take steps until there are so many, and keep the last; None when the run had to go back for a lost worker."""
        try:
            await self._take_steps(steps, on_commit)
            return await self._committer.end()
        except MemoryGone as gone:
            await self._return_for(gone)
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
            await self._keep_where_it_is()
            raise

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
        plan = self._plan()
        gathered = await self._publish_and_collect(plan)
        try:
            reason = self._decide(gathered)
            if reason is None:
                update = gathered.round.update()
                self._is_between_steps = False
                reason = await compute(self._learner.apply, update, plan.step)
                if reason is None:
                    committed = await self._commit(plan, gathered, update, started)
                    self._is_between_steps = True
                    return committed
        finally:
            gathered.round.release()
        await self._return_from(plan, reason)
        self._is_between_steps = True
        return None

    def _plan(self) -> Plan:
        progress = self.progress
        return make_plan(
            self._sampler,
            progress.step + 1,
            progress.drawn,
            progress.skipped,
            self._setup.shards,
            self._setup.batches,
        )

    async def _publish_and_collect(self, plan: Plan) -> Gathered:
        committer = self._committer
        return await self._collector.gather(plan, committer.version, committer.parameters, committer.update)

    def _decide(self, gathered: Gathered) -> str | None:
        """Why the step must not be taken; None when it may."""
        if gathered.fault is not None:
            return gathered.fault
        if not gathered.round.count:
            return "no sample of the batch counts"
        return self._setup.divergence.judge(gathered.round.loss, self.progress.losses)

    async def _commit(self, plan: Plan, gathered: Gathered, update: Update, started: float) -> Committed:
        losses = self.progress.losses.add(update.loss, self._setup.divergence.window)
        progress = replace(self.progress, step=plan.step, drawn=plan.drawn, losses=losses)
        self._collector.roster.take_seats(gathered.seats)
        assert self._committer.current is not None
        version, parent = self._committer.version + 1, self._committer.current.version
        await self._committer.commit(
            progress,
            {"loss": update.loss},
            self._sampler.samples,
            LedgerEntry(
                version,
                parent,
                plan.step,
                plan.batch,
                tuple(map(len, plan.shards)),
                gathered.shares,
                gathered.anew,
            ),
        )
        self.progress = progress
        self._tell_of_moves(plan.step, gathered)
        await self._offer(gathered)
        dense_bytes = 4 * self._learner.flat.layout.float_count * len(plan.shards)
        seconds = time.monotonic() - started
        event = Committed(
            self._setup.name,
            version,
            plan.step,
            update.loss,
            seconds,
            gathered.uplink_bytes,
            dense_bytes,
            (self._committer.update or self._committer.parameters).size_bytes,
        )
        self._observers.emit(event)
        return event

    async def _offer(self, gathered: Gathered) -> None:
        """Let the workers on this machine have the parameters without a fetch."""
        here = f"{socket.gethostname()}-"
        if any(share.worker.startswith(here) for share in gathered.shares):
            part = self._committer.parameters
            await self._host.offer(part.root, self._learner.flat.view(), functools.partial(is_whole, part))

    # going back

    async def _return_from(self, plan: Plan, reason: str) -> None:
        """Go back to the newest checkpoint, and leave the batch out."""
        target, parts = await self._newest(reason)
        self._returns[target.step] += 1
        if self._returns[target.step] > self._setup.divergence.rollbacks:
            raise TrainingError(
                f"run {self._setup.name!r} diverged at step {plan.step} again after "
                f"{self._setup.divergence.rollbacks} returns to step {target.step}: {reason}"
            )
        log.warning(
            "run %s, step %d: %s; back to step %d without batch %d (%d samples)",
            self._setup.name,
            plan.step,
            reason,
            target.step,
            plan.batch,
            sum(map(len, plan.shards)),
        )
        await self._go_back(target, parts, plan.batches)
        self._tell_of_rollback(target, f"{reason}; batch {plan.batch} is left out")

    async def _return_for(self, gone: MemoryGone) -> None:
        """Go back to the newest checkpoint, which has what was lost with a worker, and leave nothing out.

        The steps since are the same again. It is no divergence, so it may happen as often as workers die; only a run
        that never gets to its next checkpoint is ended.
        """
        self._is_between_steps = False
        target, parts = await self._newest(str(gone))
        self._lost[target.step] += 1
        if self._lost[target.step] > RETURNS:
            raise TrainingError(
                f"run {self._setup.name!r} has lost workers {RETURNS} times on its way from the checkpoint of step "
                f"{target.step} to the next one: let it keep more of them (Every(steps=)); the last time {gone}"
            ) from gone
        log.warning(
            "run %s: %s; back from step %d to step %d, nothing is left out",
            self._setup.name,
            gone,
            self.progress.step,
            target.step,
        )
        await self._go_back(target, parts, ())
        self._tell_of_rollback(target, f"{gone}; nothing is left out")
        self._is_between_steps = True

    async def _newest(self, reason: str) -> Loaded:
        found = await self._committer.newest_kept()
        if found is None:
            raise TrainingError(f"run {self._setup.name!r}: no checkpoint to go back to after {reason}")
        return found

    async def _go_back(self, target: Manifest, parts: Mapping[str, memoryview], skip: Sequence[int]) -> None:
        self.progress = await self._committer.roll_back(target, parts, skip, self._sampler.samples)
        self._collector.roster.resume_seats(self._committer.checkpoint)

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
        target, parts = await self._committer.load_kept(version)
        await self._go_back(target, parts, ())
        self._tell_of_rollback(target, "asked for")
        return self._committer.version

    async def adopt(self, point: Point, without: str, parent: int, since: int) -> int:
        """Make a state that was formed without one worker's contributions current, as a new version; its number."""
        left_out = {*self.progress.skipped, *point.progress.skipped}
        progress = replace(point.progress, skipped=tuple(sorted(left_out)))
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
        self._collector.roster.resume_seats(self._committer.checkpoint)

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

    def _tell_of_rollback(self, target: Manifest, reason: str) -> None:
        self._observers.emit(RolledBack(self._setup.name, self._committer.version, target.version, reason))
