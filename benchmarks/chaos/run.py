"""One run: servers, wires and processes up; faults; everything healed and drained; the account."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.chaos.accounting import Account, Problem, take_account, tell
from benchmarks.chaos.aof import AofKeeper, read_segments
from benchmarks.chaos.drain import drain
from benchmarks.chaos.faults import Faults
from benchmarks.chaos.fleet import Fleet, WireProcess
from benchmarks.chaos.history import Histories, read_histories
from benchmarks.chaos.ledger import Event, Ledger, read_ledgers
from benchmarks.chaos.schedule import LIVENESS_TTL, Kind, TopologyName, draw_schedule
from benchmarks.chaos.servers import Servers, make_servers
from taskmesh.testing.servers.binary import Kind as ServerKind

log = logging.getLogger("chaos")


@dataclass(frozen=True, slots=True)
class Options:
    """What is run.

    Attributes:
        drain_limit: seconds that everything may take to end once all is healed.
        keep: where ledgers, logs and the servers' files are left; None removes them.
    """

    seed: int
    seconds: float
    topology: TopologyName
    primary_loss: bool = False
    kind: ServerKind | None = None
    drain_limit: float = 60.0
    keep: Path | None = None
    workers: int = 4
    producers: int = 2
    masters: int = 2


@dataclass(slots=True)
class Report:
    """What came of it."""

    options: Options
    account: Account
    faults: dict[Kind, int]
    stories: list[str] = field(default_factory=list)
    drain_seconds: float = 0.0


async def run(options: Options) -> Report:
    """Run once. Nothing is left behind, whatever happens.

    Raises:
        RuntimeError: the servers did not start, or did not get well again.
    """
    folder = Path(tempfile.mkdtemp(prefix="taskmesh-chaos-"))
    try:
        return await _run_in(folder, options)
    finally:
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True, ignore=shutil.ignore_patterns("data"))
        shutil.rmtree(folder, ignore_errors=True)


async def _run_in(folder: Path, options: Options) -> Report:
    given_up = threading.Event()
    servers = make_servers(options.topology, options.kind, folder, given_up)
    try:
        await asyncio.to_thread(servers.start)
        keeper = AofKeeper(await asyncio.to_thread(servers.nodes), folder / "aof")
        keeper.start()
        try:
            faults, crashes, drain_seconds, primaries = await _strike(folder, servers, options, given_up)
        finally:
            await asyncio.to_thread(keeper.stop)
    finally:
        await asyncio.to_thread(servers.stop)
    histories = await asyncio.to_thread(lambda: read_histories(read_segments(folder / "aof"), primaries))
    events = read_ledgers(folder / "ledgers")
    account = take_account(events, histories, options.primary_loss)
    account.problems += [Problem("crash", "", "", text) for text in crashes]
    return Report(options, account, faults, _stories(account, events, histories), drain_seconds)


def _stories(account: Account, events: list[Event], histories: Histories) -> list[str]:
    return [tell(problem, events, histories) for problem in account.problems]


async def _strike(
    folder: Path, servers: Servers, options: Options, given_up: threading.Event
) -> tuple[dict[Kind, int], list[str], float, list[str]]:
    """Faults, healing and the drain; returns what struck, the crashes, how long the drain took, the primaries."""
    ports = servers.ports()
    wires = WireProcess(ports, options.seed) if ports else None
    try:
        clients = servers.environment(await wires.start() if wires is not None else [])
        environment = {**clients, "TASKMESH_LIVENESS_TTL": str(LIVENESS_TTL)}
        fleet = Fleet(folder, environment, options.seed)
        ledger = Ledger(folder / "ledgers" / "driver.jsonl")
        faults = Faults(fleet, servers, wires, ledger, given_up)
        try:
            fleet.add("worker", options.workers)
            fleet.add("producer", options.producers)
            fleet.add("master", options.masters)
            watch = asyncio.create_task(fleet.watch())
            try:
                await fleet.ready()
                schedule = draw_schedule(
                    options.seed, options.seconds, options.topology, options.primary_loss
                )
                await faults.run(schedule, options.seconds)
                await asyncio.to_thread(servers.heal)
                log.info("healed; draining")
                began = time.monotonic()
                await drain(fleet, folder / "ledgers", ledger, clients, options.drain_limit)
                drain_seconds = time.monotonic() - began
            finally:
                watch.cancel()
                await asyncio.gather(watch, return_exceptions=True)
            await asyncio.gather(*(fleet.end(slot) for slot in fleet.of("worker")))
            primaries = await asyncio.to_thread(servers.primaries)
        finally:
            fleet.end_all()
            ledger.close()
        return dict(faults.struck), fleet.crashes, drain_seconds, primaries
    finally:
        if wires is not None:
            await wires.stop()


def prefer(kind: ServerKind | None) -> None:
    """Let the embedded server be of that kind: the other one's programs leave the PATH of this process tree."""
    if kind is None:
        return
    other = {"redis": "valkey-server", "valkey": "redis-server"}[kind]
    folders = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(f for f in folders if not Path(f, other).exists())


def start_logging() -> None:
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(name)s: %(message)s")
    log.setLevel(logging.INFO)
