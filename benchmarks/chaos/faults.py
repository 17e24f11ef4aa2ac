"""Carrying the schedule out."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from random import Random
from typing import ParamSpec, TypeVar

import redis

from benchmarks.chaos.fleet import Fleet, Slot, WireProcess
from benchmarks.chaos.ledger import Ledger
from benchmarks.chaos.schedule import Fault, Kind
from benchmarks.chaos.servers import Servers

P = ParamSpec("P")
R = TypeVar("R")
log = logging.getLogger("chaos")
ROLES = {
    Kind.WORKER_KILL: "worker",
    Kind.WORKER_STOP_SHORT: "worker",
    Kind.WORKER_STOP_LONG: "worker",
    Kind.WORKER_DRAIN: "worker",
    Kind.PRODUCER_KILL: "producer",
    Kind.PRODUCER_STOP: "producer",
    Kind.PRODUCER_END: "producer",
    Kind.MASTER_KILL: "master",
    Kind.MASTER_STOP: "master",
}
KILLS = (Kind.WORKER_KILL, Kind.PRODUCER_KILL, Kind.MASTER_KILL)
STOPS = (Kind.WORKER_STOP_SHORT, Kind.WORKER_STOP_LONG, Kind.PRODUCER_STOP, Kind.MASTER_STOP)
ON_WIRES = (Kind.CUT, Kind.HALF_OPEN, Kind.SLOW, Kind.REPLY_CUT)


class Faults:
    """Strikes as the schedule says. Faults of one process, and faults of the servers, wait for each other.

    Attributes:
        struck: how often each kind was carried out.
    """

    def __init__(
        self,
        fleet: Fleet,
        servers: Servers,
        wires: WireProcess | None,
        ledger: Ledger,
        given_up: threading.Event,
    ) -> None:
        self._given_up = given_up
        self._fleet = fleet
        self._servers = servers
        self._wires = wires
        self._ledger = ledger
        self._servers_lock = asyncio.Lock()
        self.struck: Counter[Kind] = Counter()

    async def run(self, schedule: Sequence[Fault], seconds: float) -> None:
        """Carry the schedule out; what has not begun after ``seconds`` is left out, but for the first of a kind."""
        began = time.monotonic()
        self.struck.update(dict.fromkeys((fault.kind for fault in schedule), 0))
        async with asyncio.TaskGroup() as group:
            for fault in schedule:
                await asyncio.sleep(max(0.0, began + fault.at - time.monotonic()))
                group.create_task(self._strike(fault, began + seconds), name=f"fault {fault.kind}")
            await asyncio.sleep(max(0.0, began + seconds - time.monotonic()))

    async def _strike(self, fault: Fault, end: float) -> None:
        if fault.kind in ROLES:
            slots = self._fleet.of(ROLES[fault.kind])
            slot = slots[fault.target % len(slots)]
            async with slot.lock:
                if time.monotonic() < end or not self.struck[fault.kind]:
                    await self._strike_process(fault, slot)
        elif fault.kind in ON_WIRES and self._wires is not None:
            await self._strike_wires(fault, self._wires)
        else:
            async with self._servers_lock:
                if time.monotonic() < end or not self.struck[fault.kind]:
                    await self._strike_servers(fault)

    async def _strike_process(self, fault: Fault, slot: Slot) -> None:
        if not slot.is_running:  # it crashed: its watcher starts it again
            return
        self.struck[fault.kind] += 1
        if fault.kind in STOPS:
            self._note(fault, str(slot.pid))
            await self._fleet.stop(slot, fault.seconds)
            return
        if fault.kind in KILLS:
            await self._fleet.kill(slot)
            self._note(fault, str(slot.pid))
        else:
            self._note(fault, str(slot.pid))
            await self._fleet.end(slot)
        await asyncio.sleep(fault.seconds)
        self._fleet.start(slot)

    async def _strike_wires(self, fault: Fault, wires: WireProcess) -> None:
        self._note(fault)
        match fault.kind:
            case Kind.SLOW:
                self.struck[fault.kind] += 1
                await wires.order("slow", delay=Random(fault.target).uniform(0.005, 0.06))
                await asyncio.sleep(fault.seconds)
                await wires.order("slow", delay=0.0)
            case Kind.REPLY_CUT:
                self.struck[fault.kind] += await wires.order("reply_cut", count=1 + fault.target % 4)
            case Kind.HALF_OPEN:
                self.struck[fault.kind] += await wires.order("half_open", share=fault.share / 3)
            case _:
                self.struck[fault.kind] += await wires.order("cut", share=fault.share)

    async def _strike_servers(self, fault: Fault) -> None:
        self._note(fault)
        try:
            self.struck[fault.kind] += await self._to_its_end(
                self._servers.strike, fault.kind, fault.target, fault.seconds, fault.share
            )
        except (RuntimeError, LookupError, redis.RedisError) as error:
            log.warning("%s: %s", fault.kind, error)
            await self._to_its_end(self._servers.heal)

    async def _to_its_end(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call it in a thread. A run that is given up waits for it: it might start a server behind one's back."""
        call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            self._given_up.set()
            await asyncio.wait([call])
            raise

    def _note(self, fault: Fault, text: str = "") -> None:
        self._ledger.write({"what": "fault", "task": str(fault.kind), "text": text})
