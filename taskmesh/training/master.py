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
from collections.abc import Callable
from dataclasses import dataclass, replace

from taskmesh.checkpoints.manifest import Manifest, is_whole
from taskmesh.errors import CheckpointError, TaskmeshError, TrainingError
from taskmesh.events import Committed, Observers, RolledBack
from taskmesh.training import saver
from taskmesh.training.aggregate import Update
from taskmesh.training.collect import Collector, Gathered
from taskmesh.training.commit import Committer
from taskmesh.training.compute import compute
from taskmesh.training.data import Sampler
from taskmesh.training.host import HostMemory
from taskmesh.training.learner import Learner
from taskmesh.training.ledger import LedgerEntry
from taskmesh.training.plan import Plan, make_plan
from taskmesh.training.progress import Progress
from taskmesh.training.replay import Point
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")


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
        self._requests: list[tuple[int, asyncio.Future[int]]] = []

    async def run(self, steps: int, on_commit: Callable[[Committed], None] | None = None) -> Finished:
        """Go on until the run has seen ``steps`` updates.

        Raises:
            LeadershipLost: another master leads the run.
            TrainingError: it cannot go on.
            CheckpointError: there is no whole checkpoint to go on from, or back to.
        """
        self.progress = await self._committer.begin(self._sampler.samples)
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
        current = await self._committer.end()
        digest = current.parts["parameters"].root.hex()
        loss = current.metrics.get("loss", float("nan"))
        return Finished(current.version, current.step, loss, digest, current.skipped)

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
        self._collector.roster.take_seats(gathered.seats)
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
        found = await self._committer.newest_kept()
        if found is None:
            raise TrainingError(f"run {self._setup.name!r}: no checkpoint to go back to after {reason}")
        target, parts = found
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
        samples = self._sampler.samples
        self.progress = await self._committer.roll_back(target, parts, plan.batches, samples)
        self._collector.roster.clear_seats(target.step, f"the run went back to step {target.step}")
        self._tell_of_rollback(target, f"{reason}; batch {plan.batch} is left out")

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
        self.progress = await self._committer.roll_back(target, parts, (), self._sampler.samples)
        self._collector.roster.clear_seats(target.step, f"the run went back to step {target.step}")
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
        await self._committer.adopt(progress, metrics, self._sampler.samples, entry)
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

    def _tell_of_rollback(self, target: Manifest, reason: str) -> None:
        self._observers.emit(RolledBack(self._setup.name, self._committer.version, target.version, reason))
