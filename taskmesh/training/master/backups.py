"""Second attempts at the shards that a step waits for, while there are workers with nothing to do.

A step lasts as long as its last shard. When none of its shards waits for a worker any more, whoever is done is idle:
it gets a shard that somebody else has had for long, and the first usable attempt counts (Chen et al., "Revisiting
Distributed Synchronous SGD", 2016). Both compute the same, so which one it was does not show in the bits.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple

from taskmesh.errors import BrokerError, TaskFailed
from taskmesh.events import Observers, ShardRepeated
from taskmesh.results.handle import Handle, Held
from taskmesh.training.master.roster import Roster
from taskmesh.training.orders import ShardFailed, ShardOrder, ShardResult

log = logging.getLogger("taskmesh.training")
# A worker has a shard for longer than it computes it, since it fetches the next one meanwhile: one that is as fast as
# the others is done within about twice the time.
LATE_AFTER = 2.0
LATE_AT_LEAST = 0.02  # what is sooner is not worth a second attempt
SHORTEST_PAUSE = 0.005
LONGEST_PAUSE = 1.0


class Answer(NamedTuple):
    """What became of one attempt at a shard; ``reason`` is None when its result was taken."""

    worker: str
    reason: str | None
    failure: ShardFailed | TaskFailed | None = None


Ask = Callable[[ShardOrder], Coroutine[Any, Any, Answer]]


def find_late(held: Mapping[int, Held], took: Sequence[float], count: int) -> list[int]:
    """Up to so many shards that somebody has had for long, the longest first.

    Args:
        took: seconds that shards took which have come.
    """
    limit = max(LATE_AT_LEAST, LATE_AFTER * statistics.median(took))
    late = [shard for shard, each in held.items() if each.seconds > limit]
    return sorted(late, key=lambda shard: -held[shard].seconds)[:count]


class _Out:
    """A shard that was ordered.

    Attributes:
        handle: of the newest attempt at it; None once its result is here, and before it is submitted.
        again: the second order, when it is made.
    """

    def __init__(self, order: ShardOrder) -> None:
        self.order = order
        self.handle: Handle[ShardResult] | None = None
        self.again: asyncio.Future[ShardOrder] = asyncio.get_running_loop().create_future()


class Backups:
    """The second attempts of one step.

    Args:
        allowed: so many at once.
    """

    def __init__(self, run: str, allowed: int, roster: Roster, observers: Observers) -> None:
        self._run = run
        self._allowed = allowed
        self._roster = roster
        self._observers = observers
        self._out: dict[int, _Out] = {}
        self._took: list[float] = []

    async def first(self, order: ShardOrder, ask: Ask) -> Answer:
        """The first usable answer to an order or, should it be late, to a second one."""
        out = self._out[order.shard] = _Out(order)
        asked = [asyncio.create_task(ask(order), name="taskmesh attempt")]
        try:
            either: list[asyncio.Future[Any]] = [asked[0], out.again]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not asked[0].done():
                asked.append(asyncio.create_task(ask(out.again.result()), name="taskmesh backup"))
            return await _first_usable(asked)
        finally:
            del self._out[order.shard]
            out.again.cancel()
            for attempt in asked:
                attempt.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    def note_submitted(self, shard: int, handle: Handle[ShardResult]) -> None:
        """An attempt is under way."""
        if shard in self._out and not self._out[shard].again.done():
            self._out[shard].handle = handle

    def note_result(self, shard: int, result: ShardResult) -> None:
        """An attempt has ended."""
        if shard in self._out:
            self._out[shard].handle = None
        if result.status == "computed":
            self._took.append(result.seconds)

    async def watch(self) -> None:
        """Order late shards a second time, for ever; where none may be, there is nothing to do."""
        while self._allowed:
            pause = statistics.median(self._took) / 2 if self._took else 0.0
            await asyncio.sleep(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, pause)))
            try:
                await self._look()
            except BrokerError as error:
                log.debug("run %s: late shards: %s", self._run, error)

    async def _look(self) -> None:
        left = self._allowed - sum(out.again.done() for out in self._out.values())
        out = {
            shard: each.handle
            for shard, each in self._out.items()
            if each.handle is not None and not each.again.done()
        }
        if left <= 0 or not out or not self._took:
            return
        # They are taken up in turn: while the last one waits, nobody is idle.
        if await list(out.values())[-1].held() is None:
            return
        found = await asyncio.gather(*(handle.held() for handle in out.values()))
        held = {shard: each for shard, each in zip(out, found, strict=True) if each is not None}
        if len(held) < len(out):
            return
        usable = set(await self._roster.live_workers()) - set(self._roster.quarantined)
        for shard in find_late(held, self._took, left):
            if usable - {held[shard].worker}:
                self._repeat(shard, held[shard])

    def _repeat(self, shard: int, held: Held) -> None:
        """Have a shard computed by another worker as well."""
        out = self._out.get(shard)
        if out is None or out.handle is None:
            return
        order = out.order
        out.again.set_result(dataclasses.replace(order, avoid=tuple(sorted({*order.avoid, held.worker}))))
        log.info(
            "run %s, step %d: worker %s has had shard %d for %.3g s: another computes it too",
            self._run,
            order.step,
            held.worker,
            shard,
            held.seconds,
        )
        self._observers.emit(ShardRepeated(self._run, order.step, shard, held.worker, held.seconds))


async def _first_usable(asked: Sequence[asyncio.Task[Answer]]) -> Answer:
    waiting = set(asked)
    while True:
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        answers = [attempt.result() for attempt in done]
        usable = [answer for answer in answers if answer.reason is None]
        if usable or not waiting:
            return (usable or answers)[0]
