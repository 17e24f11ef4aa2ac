"""The end of a run: everything ends, and what the server tells of it afterwards is noted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.chaos.app import QUEUES, mesh
from benchmarks.chaos.fleet import Fleet
from benchmarks.chaos.ledger import Ledger, read_ledgers
from benchmarks.chaos.producer import note_outcome
from taskmesh import BrokerError, TaskmeshError
from taskmesh.testing import wait_until

log = logging.getLogger("chaos")
GATHER_LIMIT = (
    20.0  # seconds for a master: whoever waits looks at the record every 10 s, if its push was lost
)
READ_LIMIT = 5.0
READ_AT_ONCE = 500
MANY = 100_000


async def drain(
    fleet: Fleet, ledgers: Path, ledger: Ledger, clients: Mapping[str, str], limit: float
) -> None:
    """No new submissions; workers go on until every queue is empty, and masters until they have gathered all.

    What a failover undid will never come: whoever awaits it notes that when it has had time enough. At the end the
    outcomes that nobody has gathered are read, and the dead letters.

    Args:
        limit: seconds until what has not ended is left as it is.
    """
    submitters = fleet.of("producer", "master")
    for slot in submitters:
        fleet.tell(slot, signal.SIGUSR1)
    mesh.settings = dataclasses.replace(
        mesh.settings,
        url=clients.get("TASKMESH_URL"),
        data_folder=Path(clients.get("TASKMESH_DATA", "")),
    )
    async with mesh:
        await _await_empty(limit)
        with contextlib.suppress(AssertionError):
            await wait_until(lambda: not any(slot.is_running for slot in submitters), timeout=GATHER_LIMIT)
        await asyncio.gather(*(fleet.end(slot) for slot in submitters))
        await _await_empty(limit)  # a last submit may have been on its way
        await _read_outcomes(ledgers, ledger)
        for queue in QUEUES:
            letters = await mesh.dead_letters(queue, MANY)
            found = [letter.message.id for letter in letters if letter.message is not None]
            ledger.write(*({"what": "dead", "id": message_id} for message_id in found))


async def _await_empty(limit: float) -> None:
    give_up_at = time.monotonic() + limit
    while left := await _left():
        if time.monotonic() > give_up_at:
            log.warning("%d messages have not ended after %g s", left, limit)
            return
        await asyncio.sleep(0.1)


async def _left() -> int:
    """Messages that have not ended; 1 while the server does not tell."""
    left = 0
    try:
        for partition in (each for queue in QUEUES for each in mesh.client.partitions(queue)):
            keys = partition.keys
            for stream in (*keys.lanes, keys.parked):
                left += int(await partition.caller.command(keys.tag, "XLEN", stream))
            left += int(await partition.caller.command(keys.tag, "ZCARD", keys.delayed))
    except BrokerError:
        return 1
    return left


async def _read_outcomes(ledgers: Path, ledger: Ledger) -> None:
    events = await asyncio.to_thread(read_ledgers, ledgers)
    gathered = {event.id for event in events if event.what == "outcome"}
    rest = {
        event.id: event.task
        for event in events
        if event.what == "accepted" and event.task != "silent" and event.id not in gathered
    }
    pairs = list(rest.items())
    for first in range(0, len(pairs), READ_AT_ONCE):
        some = pairs[first : first + READ_AT_ONCE]
        await asyncio.gather(*(_read_outcome(ledger, message_id, task) for message_id, task in some))


async def _read_outcome(ledger: Ledger, message_id: str, task: str) -> None:
    try:
        outcome = await mesh.get_task(task).handle(message_id).outcome(READ_LIMIT)
    except TaskmeshError:
        ledger.write({"what": "awaited", "id": message_id})
    else:
        note_outcome(ledger, message_id, outcome)
