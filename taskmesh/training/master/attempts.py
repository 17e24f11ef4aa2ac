"""Attempts at a step's shards: submitted until a worker takes each up, answered, called off, and cleaned up after."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from taskmesh.app.client import Client
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import ResultUnavailable, TaskCancelled, TaskFailed
from taskmesh.events import Observers
from taskmesh.keys import partition_of
from taskmesh.results.handle import Handle
from taskmesh.tasks import MAX_DELIVERIES
from taskmesh.training.master.backups import Answer, Backups
from taskmesh.training.master.keeper import Keeper
from taskmesh.training.master.roster import Roster, Seat, pause_after
from taskmesh.training.memory import MemoryGone
from taskmesh.training.orders import ShardFailed, ShardOrder, ShardResult
from taskmesh.training.room import when_there_is_room
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")
MAX_REPUBLICATIONS = 5
Take = Callable[[ShardOrder, Handle[ShardResult], ShardResult], Awaitable[str | None]]


class GradientTask(Protocol):
    """The run's gradient task, as far as it is used here."""

    async def submit_in(self, delay: float, order: ShardOrder, /) -> Handle[ShardResult]: ...

    async def submit(self, order: ShardOrder, /) -> Handle[ShardResult]: ...


class ParametersGone(Exception):
    """In an asynchronous run: a worker did not find the version that a shard was ordered of."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """By what a run's shards are ordered.

    Attributes:
        roster: the run's workers.
        keeper: has what they remember handed over.
        republish: writes the current parameters again, when the server for them has lost them.
    """

    setup: RunSetup
    client: Client
    observers: Observers
    task: GradientTask
    roster: Roster
    keeper: Keeper
    republish: Callable[[], Awaitable[Part]]


class Attempts:
    """Those of one step, of one version.

    Args:
        take: puts a result into the round; says why not, where it cannot be used.
    """

    def __init__(self, dispatch: Dispatch, version: int, take: Take) -> None:
        self._with = dispatch
        self._version = version
        self._take = take
        self._handles: list[tuple[int, Handle[ShardResult]]] = []
        self._submitted: set[str] = set()
        self._ended: set[str] = set()
        self._backups = Backups(
            dispatch.setup.name, dispatch.setup.backups, dispatch.roster, dispatch.observers
        )

    async def watch(self) -> None:
        """See to second attempts at shards that are late, for ever."""
        await self._backups.watch()

    def has(self, attempt: str) -> bool:
        """Whether an attempt, by its name, is one of these."""
        return attempt.rpartition(".")[0] in self._submitted

    async def first_answer(self, order: ShardOrder) -> Answer:
        """The answer to an order, or to a second one where it is late."""
        if not self._with.setup.backups:
            return await self._ask(order)
        answer = await self._backups.first(order, self._ask)
        await self._call_off([handle for shard, handle in self._handles if shard == order.shard])
        return answer

    async def _ask(self, order: ShardOrder) -> Answer:
        """Submit an order until a worker takes it up, and put its result into the round if it can be used."""
        declines = republications = 0
        roster = self._with.roster
        while True:
            handle = await when_there_is_room(
                functools.partial(self._submit, order, declines), f"run {self._with.setup.name}"
            )
            self._handles.append((order.shard, handle))
            self._submitted.add(handle.id)
            self._backups.note_submitted(order.shard, handle)
            try:
                result = await roster.answer(handle, order.holder)
            except ShardFailed as error:
                return Answer(error.worker, str(error), error)
            except TaskFailed as error:
                return Answer("", str(error), error)
            except (ResultUnavailable, TaskCancelled) as error:
                return Answer("", str(error))
            if result is None:  # the holder is gone; it may have handed over what it remembered
                order = dataclasses.replace(order, holder="")
                continue
            self._ended.add(handle.id)
            self._backups.note_result(order.shard, result)
            if result.status == "declined":
                declines += 1
                if {*order.avoid} - {*roster.unlike} and not await roster.has_others(order.avoid):
                    order, declines = dataclasses.replace(order, avoid=roster.unlike), 0
            elif result.status == "unlike":
                declines += 1
                roster.note_unlike(result.worker, result.reason)
                order = dataclasses.replace(order, avoid=tuple({*order.avoid, *roster.unlike}))
            elif result.status == "forgot":
                raise MemoryGone(roster.seat_of(order.shard).holder, [order.shard], result.reason)
            elif result.status == "gone" and self._with.setup.is_asynchronous:
                raise ParametersGone(result.reason)
            elif result.status == "gone" and republications < MAX_REPUBLICATIONS:
                republications += 1
                log.info("run %s, shard %d: %s", self._with.setup.name, order.shard, result.reason)
                parameters = await self._with.republish()
                order = dataclasses.replace(
                    order, parameters=parameters, update=None if parameters.kept else order.update
                )
            else:
                return Answer(result.worker, await self._take(order, handle, result))

    async def release(self, order: ShardOrder) -> ShardOrder:
        """Let others than its holder compute a shard: they find what its compression remembered."""
        await self._with.keeper.hand_over(order.shard, Seat(order.holder, order.memory))
        return dataclasses.replace(order, holder="")

    async def _submit(self, order: ShardOrder, declines: int) -> Handle[ShardResult]:
        if not declines:
            return await self._with.task.submit(order)
        return await self._with.task.submit_in(pause_after(declines), order)

    async def _call_off(self, handles: Sequence[Handle[ShardResult]]) -> None:
        """Cancel the attempts that have not ended."""
        unfinished = [handle for handle in handles if handle.id not in self._ended]
        self._ended.update(handle.id for handle in unfinished)
        await asyncio.gather(*(handle.cancel() for handle in unfinished), return_exceptions=True)

    async def clean_up(self, pieces: int) -> None:
        """Call off what has not ended, and remove the records and gradients of all attempts.

        What comes later still goes with its time to live.

        Args:
            pieces: of the largest payload that came in pieces.
        """
        client, keys = self._with.client, self._with.setup.keys
        await self._call_off([handle for _, handle in self._handles])
        records = [
            client.partition(self._with.setup.name, partition_of(handle.id)).keys.result(handle.id)
            for _, handle in self._handles
        ]
        await chunks.unlink(client.caller, records)
        gradients = [
            keys.gradient(self._version, shard, f"{handle.id}.{delivery}", place)
            for shard, handle in self._handles
            for delivery in range(1, MAX_DELIVERIES + 1)
            for place in range(pieces)
        ]
        await chunks.unlink(client.bulk, gradients)
