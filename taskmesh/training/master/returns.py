"""Going back to a checkpoint: after a bad step, for a lost worker, or because somebody wants to."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.events import Observers, RolledBack
from taskmesh.training.data import Sampler
from taskmesh.training.master.commit import Committer, Loaded
from taskmesh.training.master.roster import Roster
from taskmesh.training.master.rounds import Ready
from taskmesh.training.memory import MemoryGone
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.progress import Progress

log = logging.getLogger("taskmesh.training")
LOST = 20  # returns to one and the same checkpoint because workers were lost


class Returns:
    """Takes one run back. Nothing of it may be under way meanwhile.

    Each way ends with where the run stands then, and raises:
        TrainingError: there is no checkpoint, or the run has come back to the same one too often.
        CheckpointError: there are checkpoints, and all are damaged.
    """

    def __init__(
        self,
        setup: RunSetup,
        sampler: Sampler,
        committer: Committer,
        roster: Roster,
        observers: Observers,
    ) -> None:
        self._setup = setup
        self._sampler = sampler
        self._committer = committer
        self._roster = roster
        self._observers = observers
        self._diverged: Counter[int] = Counter()  # by the step that the run went back to
        self._lost: Counter[int] = Counter()

    async def to(self, version: int) -> Progress:
        """Back to a kept version that was asked for."""
        return await self._go(await self._committer.load_kept(version), (), "asked for")

    async def after(self, ready: Ready, reason: str) -> Progress:
        """Back to the newest checkpoint after a step that must not be taken, which is left out with its batches."""
        return await self._leave_out(await self._newest(reason), ready, ready.plan.sources, reason)

    async def after_drop(self, ready: Ready, reason: str, progress: Progress) -> Progress:
        """Back to the newest checkpoint before the last good value of a metric, without the batches since that value.

        What was kept after it may have the cause in it already, in the optimizer's state before it shows in the metric.
        """
        found = await self._newest_good(reason, progress.validation.step)
        first = max(progress.validation.drawn, found[0].batch)
        batches = {*range(first, ready.progress.drawn), *ready.plan.sources}
        return await self._leave_out(found, ready, sorted(batches), reason)

    async def for_lost(self, gone: MemoryGone, progress: Progress) -> Progress:
        """Back to the newest checkpoint, which has what was lost with a worker; nothing is left out.

        The steps since are the same again. It is no divergence, so it may happen as often as workers die; only a run
        that never gets to its next checkpoint is ended.
        """
        found = await self._newest(str(gone))
        step = found[0].step
        self._lost[step] += 1
        if self._lost[step] > LOST:
            raise TrainingError(
                f"run {self._setup.name!r} has lost workers {LOST} times on its way from the checkpoint of step {step} "
                f"to the next one: let it keep more of them (Every(steps=)); the last time {gone}"
            ) from gone
        log.warning(
            "run %s: %s; back from step %d to step %d, nothing is left out",
            self._setup.name,
            gone,
            progress.step,
            step,
        )
        return await self._go(found, (), f"{gone}; nothing is left out")

    async def _newest(self, reason: str) -> Loaded:
        return self._hold(await self._committer.newest_kept(), reason)

    async def _newest_good(self, reason: str, step: int) -> Loaded:
        """The newest checkpoint up to a step; else the oldest."""
        kept = await self._committer.kept()
        good = [manifest for manifest in reversed(kept) if manifest.step <= step]
        for manifest in (*good, *(each for each in kept if each.step > step)):
            try:
                return await self._committer.load_kept(manifest.version)
            except CheckpointError as error:
                log.error("%s; looking for another version", error)
        return self._hold(None, reason)

    def _hold(self, found: Loaded | None, reason: str) -> Loaded:
        if found is None:
            raise TrainingError(f"run {self._setup.name!r}: no checkpoint to go back to after {reason}")
        return found

    async def _leave_out(self, found: Loaded, ready: Ready, batches: Sequence[int], reason: str) -> Progress:
        step, back = ready.progress.step, found[0].step
        self._diverged[back] += 1
        if self._diverged[back] > self._setup.divergence.rollbacks:
            raise TrainingError(
                f"run {self._setup.name!r} diverged at step {step} again after "
                f"{self._setup.divergence.rollbacks} returns to step {back}: {reason}"
            )
        log.warning(
            "run %s, step %d: %s; back to step %d without %s (%d samples)",
            self._setup.name,
            step,
            reason,
            back,
            _named(batches),
            sum(len(self._sampler.batch(number)) for number in batches),
        )
        return await self._go(found, batches, f"{reason}; left out: {_named(batches)}")

    async def _go(self, found: Loaded, skip: Sequence[int], reason: str) -> Progress:
        target, parts = found
        progress = await self._committer.roll_back(target, parts, skip, self._sampler.samples)
        self._roster.resume_seats(self._committer.checkpoint)
        event = RolledBack(self._setup.name, self._committer.version, target.version, reason)
        self._observers.emit(event)
        return progress


def _named(batches: Sequence[int]) -> str:
    """Batches, in order, in words."""
    if len(batches) == 1:
        return f"batch {batches[0]}"
    if batches[-1] - batches[0] == len(batches) - 1:
        return f"batches {batches[0]} to {batches[-1]}"
    return f"batches {', '.join(map(str, batches))}"
