"""A producer or master process of the chaos run.

A producer submits. A master submits too, and gathers the results of what it and its predecessors had accepted: those
that were killed left their ids in the ledger. SIGTERM ends either at once; SIGUSR1 ends the submitting, and then the
process when everything has been gathered; a SIGTERM behind it has it note what it still awaits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.chaos.app import ledger, mesh
from benchmarks.chaos.ledger import Ledger, read_file
from benchmarks.chaos.process import begin
from benchmarks.chaos.workload import Item, next_item
from taskmesh import BrokerError, BrokerFull, Handle, QueueFull, TaskmeshError
from taskmesh.messages import Outcome

log = logging.getLogger("chaos.producer")
PAUSE = 0.025  # seconds between two submissions, on average
GATHER_AT_MOST = 400


def note_outcome(ledger: Ledger, message_id: str, outcome: Outcome) -> None:
    """As a handle told it; a success with the name of the run that it is of."""
    run = outcome.value["run"] if isinstance(outcome.value, dict) else ""
    ledger.write({"what": "outcome", "id": message_id, "run": run, "text": str(outcome.status)})


class Producer:
    """Submits items until it is told to stop.

    Args:
        name: begins the keys of its messages; no other incarnation has it.
        gathers: it awaits outcomes, too.
    """

    def __init__(self, name: str, seed: int, gathers: bool) -> None:
        self._name = name
        self._draw = Random(f"{seed}:{name}")
        self._gathers = gathers
        self._count = 0
        self._errands: set[asyncio.Task[None]] = set()
        self._awaited: set[str] = set()

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            await self._submit(next_item(self._draw))
            await asyncio.sleep(self._draw.uniform(0.0, 2 * PAUSE))

    async def gathered(self) -> None:
        """Return when nothing is awaited any more."""
        while self._errands:
            await asyncio.wait(self._errands)

    def adopt(self, folder: Path, slot: str) -> None:
        """Gather what earlier incarnations of this slot had accepted and not gathered."""
        accepted: dict[str, str] = {}
        for path in folder.glob(f"{slot}.*.jsonl"):
            for event in read_file(path):
                if event.what == "accepted" and event.task != "silent":
                    accepted[event.id] = event.task
        for path in folder.glob(f"{slot}.*.jsonl"):
            for event in read_file(path):
                if event.what == "outcome":
                    accepted.pop(event.id, None)
        for message_id, task in accepted.items():
            self._go(self._gather(mesh.get_task(task).handle(message_id)))

    async def _submit(self, item: Item) -> None:
        keys = []
        for _ in item.arguments:
            self._count += 1
            keys.append(f"{self._name}-{self._count}")
        ledger.write(*({"what": "intent", "key": key, "task": item.task} for key in keys))
        try:
            handles = await self._call(item, keys)
        except (BrokerFull, QueueFull) as error:
            # Of a bulk submission some may be in: the first ones, or those of another partition.
            what = "refused" if len(keys) == 1 else "unknown"
            ledger.write(*({"what": what, "key": key, "text": str(error)} for key in keys))
        except TaskmeshError as error:
            log.info("not known to be accepted: %s", error)
            ledger.write(*({"what": "unknown", "key": key, "text": str(error)} for key in keys))
        else:
            ledger.write(
                *(
                    {"what": "accepted", "key": key, "id": handle.id, "task": item.task}
                    for key, handle in zip(keys, handles, strict=True)
                )
            )
            for key, handle in zip(keys, handles, strict=True):
                self._follow(item, key, handle)

    async def _call(self, item: Item, keys: list[str]) -> list[Handle[Any]]:
        task = mesh.get_task(item.task).options(priority=item.lane)
        if len(keys) > 1:
            calls = [task.bind(key, *more) for key, more in zip(keys, item.arguments, strict=True)]
            return list(await task.submit_many(calls))
        arguments = (keys[0], *item.arguments[0])
        if item.delay is not None:
            return [await task.submit_in(item.delay, *arguments)]
        return [await task.submit(*arguments)]

    def _follow(self, item: Item, key: str, handle: Handle[Any]) -> None:
        if item.cancel_after is not None:
            self._go(self._cancel(key, handle, item.cancel_after))
        if self._gathers and item.task != "silent" and len(self._errands) < GATHER_AT_MOST:
            self._go(self._gather(handle))

    def _go(self, errand: Any) -> None:
        task = asyncio.create_task(errand)
        self._errands.add(task)
        task.add_done_callback(self._errands.discard)

    async def _cancel(self, key: str, handle: Handle[Any], after: float) -> None:
        await asyncio.sleep(after)
        about = {"key": key, "id": handle.id}
        ledger.write({"what": "cancel", **about, "text": "asked"})
        try:
            answer = await handle.cancel()
        except TaskmeshError as error:
            log.info("cancelling: %s", error)
            return
        ledger.write({"what": "cancel", **about, "text": str(answer)})

    def say_what_is_awaited(self) -> None:
        """At the end of the run: what nobody has told this process the outcome of."""
        ledger.write(*({"what": "awaited", "id": message_id} for message_id in sorted(self._awaited)))

    async def _gather(self, handle: Handle[Any]) -> None:
        self._awaited.add(handle.id)
        while handle.id in self._awaited:
            try:
                note_outcome(ledger, handle.id, await handle.outcome())
            except BrokerError as error:  # a large result lies beside its record; the server stayed away
                log.info("gathering: %s", error)
                await asyncio.sleep(0.2)
            except TaskmeshError as error:
                log.info("gathering is given up: %s", error)
                return
            else:
                self._awaited.discard(handle.id)


async def connect() -> None:
    while True:
        try:
            await mesh.__aenter__()
            return
        except BrokerError as error:
            log.info("connecting: %s", error)
            await asyncio.sleep(0.2)


def set_all(*events: asyncio.Event) -> None:
    for event in events:
        event.set()


async def main(slot: str, incarnation: int, seed: int) -> None:
    loop = asyncio.get_running_loop()
    stop, end, finishing = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR1, set_all, stop, finishing)
    loop.add_signal_handler(signal.SIGTERM, set_all, stop, end)
    gathers = slot.startswith("master")
    producer = Producer(f"{slot}.{incarnation}", seed, gathers)
    await connect()
    ledger.write({"what": "ready"})
    if gathers and incarnation > 1:
        producer.adopt(Path(os.environ["CHAOS_LEDGER"]).parent, slot)
    await producer.run(stop)
    gathered = asyncio.create_task(producer.gathered())
    ended = asyncio.create_task(end.wait())
    await asyncio.wait([gathered, ended], return_when=asyncio.FIRST_COMPLETED)
    for task in (gathered, ended):
        task.cancel()
    if finishing.is_set():
        producer.say_what_is_awaited()
    repeats = mesh.client.repeats
    if repeats:
        ledger.write({"what": "repeats", "text": str(repeats)})
    await mesh.__aexit__()


if __name__ == "__main__":
    begin()
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
