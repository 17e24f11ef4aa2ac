"""Steps that are made of one shard each, whenever it comes: what comes next in an asynchronous run.

So many shards are under way at once. Each is computed of the parameters that were current when it was ordered, and its
step is taken when it comes, of parameters that others have changed since. None is taken that would leave another one
too old, so what is computed is never thrown away: the shards that are under way could always be taken in the order in
which they were begun, and each would be in time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from taskmesh.errors import TrainingError
from taskmesh.training.data import Sampler
from taskmesh.training.master.attempts import MAX_REPUBLICATIONS, ParametersGone
from taskmesh.training.master.collect import Collector, Gathered
from taskmesh.training.master.commit import Committer
from taskmesh.training.master.rounds import Ready
from taskmesh.training.plan import Owed, Plan, plan_of_one
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.progress import Progress

log = logging.getLogger("taskmesh.training")


def may_be_taken(step: int, others: Iterable[int], staleness: int) -> bool:
    """Whether the next step may be taken: all others that are under way can still be in time.

    Args:
        step: steps that were taken so far.
        others: how many had been taken when each of the others was begun.
    """
    return all(step + 1 + ahead - begun <= staleness for ahead, begun in enumerate(sorted(others)))


class _UnderWay(NamedTuple):
    """A shard that was ordered: of which version, after how many steps."""

    plan: Plan
    base: int
    begun: int
    gathering: asyncio.Task[Gathered]


class Stream:
    """Keeps shards under way, and hands them out as they come."""

    def __init__(
        self,
        setup: RunSetup,
        sampler: Sampler,
        committer: Committer,
        collector: Collector,
        staleness: int,
    ) -> None:
        self._setup = setup
        self._sampler = sampler
        self._committer = committer
        self._collector = collector
        self._staleness = staleness
        # The last of them is in time when all others are taken before it.
        self._at_once = min(setup.shards, staleness + 1)
        self._under_way: dict[Owed, _UnderWay] = {}
        self._gone = 0  # in a row

    async def next(self, progress: Progress) -> Ready:
        """Wait for a shard whose step may be taken.

        Raises:
            TrainingError: a shard's handler raised again and again, or the parameters are lost again and again.
        """
        while True:
            progress = self._fill(progress)
            chosen = self._choose(progress.step)
            if chosen is None:
                waiting = [each.gathering for each in self._under_way.values() if not each.gathering.done()]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                continue
            under_way = self._under_way.pop(chosen)
            try:
                gathered = under_way.gathering.result()
            except ParametersGone as error:
                await self._republish(error)
                continue
            self._gone = 0
            owed = tuple(each for each in progress.owed if each != chosen)
            after = replace(progress, step=progress.step + 1, owed=owed)
            return Ready(under_way.plan, gathered, after, under_way.base, progress.step - under_way.begun)

    def _fill(self, progress: Progress) -> Progress:
        """Order what is owed, and draw further batches as they are needed."""
        while len(self._under_way) < self._at_once:
            unit = next((each for each in progress.owed if each not in self._under_way), None)
            if unit is None:
                progress = progress.draw(self._sampler, self._setup.shards)
            else:
                self._begin(unit, progress.step)
        return progress

    def _begin(self, unit: Owed, step: int) -> None:
        committer = self._committer
        assert committer.current is not None
        plan, base = plan_of_one(self._sampler, unit, self._setup.shards), committer.current.version
        committer.published.hold(base)
        gathering = asyncio.create_task(
            self._collector.gather(plan, base, committer.parameters), name="taskmesh unit"
        )
        gathering.add_done_callback(lambda _: committer.published.release(base))
        self._under_way[unit] = _UnderWay(plan, base, step, gathering)

    def _choose(self, step: int) -> Owed | None:
        """One that has come and may be taken, or has failed, the oldest first; None when one must be waited for."""
        oldest_first = sorted(self._under_way, key=lambda unit: self._under_way[unit].begun)
        for unit in oldest_first:
            gathering = self._under_way[unit].gathering
            others = (each.begun for other, each in self._under_way.items() if other != unit)
            if gathering.done() and (gathering.exception() or may_be_taken(step, others, self._staleness)):
                return unit
        return None

    async def _republish(self, error: ParametersGone) -> None:
        """A worker did not find its parameters: let it have the current ones, which nobody changes meanwhile."""
        self._gone += 1
        if self._gone > MAX_REPUBLICATIONS * self._at_once:
            raise TrainingError(f"run {self._setup.name!r}: workers do not find the parameters: {error}")
        log.info("run %s: %s; the shard is ordered again", self._setup.name, error)
        await self._committer.republish()

    async def stop(self) -> None:
        """Call off what is under way; it stays owed."""
        under_way = [each.gathering for each in self._under_way.values()]
        self._under_way.clear()
        for gathering in under_way:
            gathering.cancel()
        for gathered in await asyncio.gather(*under_way, return_exceptions=True):
            if isinstance(gathered, Gathered):
                gathered.round.release()
