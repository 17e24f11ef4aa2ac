"""Renewing a worker's lease on all its partitions, side by side: a node that hangs costs no lease elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from taskmesh.broker.connect import Server
from taskmesh.broker.link import ScriptMissing
from taskmesh.broker.liveness import BEATS_PER_TTL, NO_ANSWER, STRUCK_OFF, Beat
from taskmesh.broker.scripts import HEARTBEAT
from taskmesh.errors import BrokerError

log = logging.getLogger("taskmesh.worker")
SHORTEST_PATIENCE = 0.5


class Place(NamedTuple):
    """One partition: its hash tag and the key of its workers."""

    tag: bytes
    key: bytes


class Plan(msgspec.Struct, frozen=True):
    """What a process that keeps a lease for a worker is to beat for, and for whom."""

    url: str
    places: list[Place]
    ttl: float
    worker_pid: int


class Word(msgspec.Struct, frozen=True):
    """What the worker says from time to time.

    Attributes:
        names: what it is called in each place.
        patience: seconds that it may be silent from ``said`` (monotonic) on; None for ever.
    """

    names: list[bytes]
    offset_ms: int
    patience: float | None
    said: float


class Report(msgspec.Struct, frozen=True):
    """What the worker is told: a beat in one of the places."""

    place: int
    beat: Beat


class Keeper:
    """Beats for every place about four times in a TTL, in an event loop of its own.

    Args:
        name: the worker's present name in a place (by its number); empty while it is not to be renewed.
        offset_ms: added to the server's time; 0 outside tests.
        report: hears of every beat.
    """

    def __init__(
        self,
        url: str,
        places: Sequence[Place],
        ttl: float,
        name: Callable[[int], bytes],
        offset_ms: Callable[[], int],
        report: Callable[[int, Beat], object],
    ) -> None:
        self._url = url
        self._places = places
        self._interval = ttl / BEATS_PER_TTL
        self._patience = max(SHORTEST_PATIENCE, ttl / 2)
        self._name = name
        self._offset_ms = offset_ms
        self._report = report

    async def run(self) -> None:
        """Beat until it is cancelled."""
        server = await self._connect()
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(self._places)):
                    group.create_task(self._keep(server, number))
        finally:
            await server.close()

    async def _connect(self) -> Server:
        while True:
            try:
                return await Server.connect(self._url)
            except BrokerError as error:
                log.debug("heartbeat: %s", error)
                await asyncio.sleep(self._interval / 4)

    async def _keep(self, server: Server, number: int) -> None:
        while True:
            began = time.monotonic()
            worker = self._name(number)
            pause = self._interval
            if worker:
                beat = await self._beat(server, self._places[number], worker)
                self._report(number, beat)
                if beat.server_ms == NO_ANSWER:
                    pause /= 4
            await asyncio.sleep(max(0.0, began + pause - time.monotonic()))

    async def _beat(self, server: Server, place: Place, worker: bytes) -> Beat:
        began = time.monotonic()
        generation = 0
        try:
            link = server.link(place.tag)
            arguments = (1, place.key, self._offset_ms(), worker)
            reply = (await link.call_many([("EVALSHA", HEARTBEAT.sha, *arguments)], self._patience))[0]
            if isinstance(reply, ScriptMissing):
                reply = (await link.call_many([("EVAL", HEARTBEAT.source, *arguments)], self._patience))[0]
            if isinstance(reply, BrokerError):
                raise reply
            server_ms = STRUCK_OFF if reply is None else int(reply)
            generation = link.generation
        except BrokerError as error:
            log.debug("heartbeat: %s", error)
            server_ms = NO_ANSWER
            await self._refresh(server)
        return Beat(worker, began, time.monotonic(), server_ms, generation)

    async def _refresh(self, server: Server) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await server.refresh()
        except (BrokerError, TimeoutError):
            pass  # the next beat tells what is wrong
