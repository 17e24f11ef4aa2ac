"""The master's side of what compressions remember: workers write what they hold, for checkpoints and for each other."""

from __future__ import annotations

import asyncio
import functools
from collections import ChainMap, defaultdict
from collections.abc import Awaitable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple, Protocol, TypeVar

from taskmesh.broker.chunks import CHUNK_BYTES
from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.checkpoints.tables import memory_name
from taskmesh.errors import CheckpointError, ResultUnavailable, TaskCancelled, TaskFailed
from taskmesh.results.handle import Handle
from taskmesh.training.master.roster import Roster, Seat
from taskmesh.training.memory import MemoryGone
from taskmesh.training.orders import MemoryOrder, MemoryResult, Remembered
from taskmesh.training.room import when_there_is_room
from taskmesh.training.setup import RunSetup

R = TypeVar("R")
TRIES = 3  # at an order whose result is lost
FIRST_PAUSE = 0.02  # before a worker is asked whether it has written everything; doubled each time
LONGEST_PAUSE = 1.0


class Begun(NamedTuple):
    """A checkpoint's parts that are there, and what the workers have answered that write the others."""

    parts: dict[str, Part]
    results: dict[MemoryOrder, MemoryResult]


class MemoryTask(Protocol):
    """The run's task for what workers remember, as far as it is used here."""

    async def submit(self, order: MemoryOrder, /) -> Handle[MemoryResult]: ...

    async def __call__(self, order: MemoryOrder, /) -> MemoryResult: ...


class Keeper:
    """Has the workers of one run write what they remember, for the holder of a fencing token.

    Args:
        state_bytes: of what is remembered of one shard.
    """

    def __init__(
        self, setup: RunSetup, roster: Roster, task: MemoryTask, token: int, state_bytes: int
    ) -> None:
        self._setup = setup
        self._roster = roster
        self._task = task
        self._token = token
        self._state_bytes = state_bytes

    @property
    def seats(self) -> dict[int, Seat]:
        """What the shards of the current version go on from, where their compression remembers something."""
        return self._roster.seats

    async def begin(self, version: int, seats: Mapping[int, Seat], earlier: Manifest | None) -> Begun:
        """Have what all shards go on from written for a checkpoint.

        Returns when the workers hold on to it; before that, they forget it when they have computed two more steps.

        Args:
            earlier: the newest checkpoint.

        Raises:
            MemoryGone: a worker that held something is not there any more.
            CheckpointError: it cannot be written.
        """
        parts = {memory_name(shard): seat.kept for shard, seat in seats.items() if seat.kept is not None}
        wanted: dict[str, list[Remembered]] = defaultdict(list)
        chunks = -(-self._state_bytes // CHUNK_BYTES)
        for shard, seat in sorted(seats.items()):
            if seat.kept is None:
                lender = None if earlier is None else earlier.parts.get(memory_name(shard))
                wanted[seat.holder].append(Remembered(shard, seat.memory, shard * chunks, lender))
        orders = [
            MemoryOrder(version, self._token, holder, tuple(states)) for holder, states in wanted.items()
        ]
        results = await _all(self._write(order) for order in orders)
        return Begun(parts, dict(zip(orders, results, strict=True)))

    async def finish(self, begun: Begun) -> dict[str, Part]:
        """The parts of all shards, when they are written.

        Raises:
            as ``begin``.
        """
        written = await _all(self._written(order, result) for order, result in begun.results.items())
        return dict(ChainMap(begun.parts, *written))

    async def hand_over(self, shard: int, seat: Seat) -> None:
        """Have a state written to where others find it, if its holder is there."""
        if seat.holder:
            await self._ask(MemoryOrder(0, 0, seat.holder, (Remembered(shard, seat.memory),)))

    async def _write(self, order: MemoryOrder) -> MemoryResult:
        result = await self._ask(order)
        if result is None:  # what a worker that has stopped handed over, anybody can write
            result = await self._task(replace(order, holder=""))
        if result.reason:
            raise MemoryGone(order.holder, [state.shard for state in order.states])
        return result

    async def _written(self, order: MemoryOrder, result: MemoryResult) -> dict[str, Part]:
        pause = FIRST_PAUSE
        while not result.ready:
            await asyncio.sleep(pause)
            pause = min(LONGEST_PAUSE, 2 * pause)
            result = await self._write(order)
        if [part.size_bytes for part in result.parts] != [self._state_bytes] * len(order.states):
            raise CheckpointError(
                f"run {self._setup.name!r}: worker {result.worker} wrote something else than what version "
                f"{order.version} is to keep; it runs other code"
            )
        names = [memory_name(state.shard) for state in order.states]
        return dict(zip(names, result.parts, strict=True))

    async def _ask(self, order: MemoryOrder) -> MemoryResult | None:
        """The result of an order; None when the worker that it goes to is gone."""
        name = f"run {self._setup.name}"
        tries = 0
        while True:
            handle = await when_there_is_room(functools.partial(self._task.submit, order), name)
            try:
                return await self._roster.answer(handle, order.holder)
            except (TaskFailed, ResultUnavailable, TaskCancelled) as error:
                tries += 1
                if tries == TRIES:
                    raise CheckpointError(
                        f"{name}: what a compression remembers cannot be kept: {error}"
                    ) from error


async def _all(work: Iterable[Awaitable[R]]) -> list[R]:
    """Do everything; then raise what any of it has raised."""
    found = await asyncio.gather(*work, return_exceptions=True)
    results: list[R] = []
    for each in found:
        if isinstance(each, BaseException):
            raise each
        results.append(each)
    return results
