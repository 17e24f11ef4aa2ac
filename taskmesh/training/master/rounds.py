"""Steps that are made of one round of shards each: what comes next in a synchronous run."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from taskmesh.training.data import Sampler
from taskmesh.training.master.collect import Collector, Gathered
from taskmesh.training.master.commit import Committer
from taskmesh.training.plan import Plan, make_plan
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.progress import Progress


class Ready(NamedTuple):
    """What the next step can be made of.

    Attributes:
        progress: where the run stands when the step is taken; its losses are those before it.
        base: the version whose parameters the gradient is of, in an asynchronous run; -1 for the current one.
        staleness: steps that were taken since.
    """

    plan: Plan
    gathered: Gathered
    progress: Progress
    base: int = -1
    staleness: int = 0


class Source(Protocol):
    """Where a run's steps come from."""

    async def next(self, progress: Progress) -> Ready:
        """What the step after that can be made of.

        Raises:
            TrainingError: a shard's handler raised again and again.
        """
        ...

    async def stop(self) -> None:
        """Nothing more is wanted, or the run goes on from another version: nothing is under way when this returns."""
        ...


class Rounds:
    """One round after the other, each of the current version."""

    def __init__(self, setup: RunSetup, sampler: Sampler, committer: Committer, collector: Collector) -> None:
        self._setup = setup
        self._sampler = sampler
        self._committer = committer
        self._collector = collector

    async def next(self, progress: Progress) -> Ready:
        """Publish the shards of the next step, and collect them."""
        plan = make_plan(
            self._sampler,
            progress.step + 1,
            progress.drawn,
            progress.skipped,
            self._setup.shards,
            self._setup.batches,
            progress.owed[: self._setup.extra],
        )
        committer = self._committer
        gathered = await self._collector.gather(
            plan, committer.version, committer.parameters, committer.update
        )
        return Ready(plan, gathered, progress.after(plan, gathered.late))

    async def stop(self) -> None:
        """A round is over when it is handed out."""
