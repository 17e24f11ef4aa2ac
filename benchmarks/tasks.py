"""The benchmark:  python -m benchmarks.tasks [--json] [--quick] [--peers NAMES] [--repeats N] [--aof]

Ours, the bare loop and the peers in turn, repeat after repeat, so that a drift of the machine meets all of
them alike; medians at the end. See README.md for what each figure is.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import redis

from benchmarks import bare, environments, report
from benchmarks.measure import Bench, Scale
from benchmarks.processes import SideFailed
from benchmarks.servers import Server
from benchmarks.sides import PEERS, Side, ours

FAILURES = (SideFailed, environments.InstallFailed, subprocess.SubprocessError, redis.RedisError, OSError)
QUICK = Scale(seconds=1.0, round_trips=100, round_trip_seconds=5.0, delayed=50)


@dataclass
class Outcome:
    """What has been measured so far."""

    bare: list[report.Figures] = field(default_factory=list)
    ours: list[report.Figures] = field(default_factory=list)
    peers: dict[str, list[report.Figures]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the answer."""
    print(text, file=sys.stderr, flush=True)


def prepare(names: Sequence[str], outcome: Outcome) -> list[Side]:
    """The peers that can run here; the others are named in `outcome.skipped`."""
    ready = []
    for name in names:
        try:
            outcome.versions[name] = environments.versions_of(name)
            ready.append(PEERS[name])
        except FAILURES as error:
            outcome.skipped[name] = f"not installed: {error}"
            say(f"{name}: skipped, {outcome.skipped[name]}")
    return ready


def measure_ours(bench: Bench) -> dict[str, float | None]:
    """Our own figures: what every side has, and what only we are asked for."""
    adapter = importlib.import_module("benchmarks.peers.ours")
    figures = bench.repeat()
    if hasattr(adapter, "enqueue_delayed"):
        figures["delayed_lateness_p99_s"] = bench.delayed_lateness()
    figures["recovery_after_kill_s"] = bench.recovery_after_kill()
    figures["liveness_ttl_s"] = getattr(adapter, "LIVENESS_TTL_S", None)
    return figures


def measure_peer(bench: Bench) -> report.Figures:
    """A peer's figures, with one more try: a failure may be the machine's."""
    try:
        return bench.repeat()
    except FAILURES as error:
        say(f"{bench.side.name}: {error}; once more")
        return bench.repeat()


def run(options: argparse.Namespace, names: Sequence[str]) -> Outcome:
    """Everything, in turn."""
    scale = QUICK if options.quick else Scale(seconds=options.seconds)
    scale = replace(scale, persistent=options.aof)
    outcome = Outcome()
    mine = ours()
    if mine is None:
        say("ours: there is no benchmarks/peers/ours.py yet")
    peers = prepare(names, outcome)
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        our_bench = Bench(mine, scale, folder) if mine is not None else None
        benches = {side.name: Bench(side, scale, folder) for side in peers}
        for turn in range(1, options.repeats + 1):
            outcome.bare.append(bare.repeat(scale.seconds, scale.round_trips, persistent=options.aof))
            if our_bench is not None:
                outcome.ours.append(measure_ours(our_bench))
                say(f"[{turn}/{options.repeats}]\n" + report.table({"ours": outcome.ours[-1]}))
            for peer in [peer for peer in benches if peer not in outcome.skipped]:
                try:
                    outcome.peers.setdefault(peer, []).append(measure_peer(benches[peer]))
                    say(f"[{turn}/{options.repeats}]\n" + report.table({peer: outcome.peers[peer][-1]}))
                except FAILURES as error:
                    outcome.skipped[peer] = str(error)
                    say(f"{peer}: skipped, {error}")
    return outcome


def answer(outcome: Outcome, options: argparse.Namespace, server: str) -> dict[str, Any]:
    """The JSON object."""
    mine = report.medians(outcome.ours, (*report.SIDE_KEYS, *report.OUR_KEYS))
    peers = {name: report.medians(runs, report.SIDE_KEYS) for name, runs in outcome.peers.items() if runs}
    return {
        **mine,
        **report.medians(outcome.bare, report.BARE_KEYS),
        "peers": peers,
        "peers_skipped": outcome.skipped,
        "ratios": report.ratios(mine, peers),
        "repeats": {"ours": outcome.ours, "bare": outcome.bare, **outcome.peers},
        "versions": outcome.versions,
        "settings": {
            "repeats": options.repeats,
            "seconds": QUICK.seconds if options.quick else options.seconds,
            "quick": options.quick,
            "aof": options.aof,
            "server": server,
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        },
    }


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the names of the peers to run."""
    everyone = ",".join(PEERS)
    parser = argparse.ArgumentParser("python -m benchmarks.tasks", description="taskmesh and its peers")
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object as the last line of stdout")
    add("--quick", action="store_true", help="drains of a second, few round trips: to see that it runs")
    add("--peers", default=everyone, metavar="NAMES", help="with commas between them, or none (default: all)")
    add("--repeats", type=int, default=3, metavar="N", help="turns; the figures are medians (default 3)")
    add("--seconds", type=float, default=5.5, metavar="S", help="that a drain lasts at least (default 5.5)")
    add("--aof", action="store_true", help="append-only file, one fsync a second, for every side")
    options = parser.parse_args(arguments)
    wanted = "" if options.peers == "none" else options.peers
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if unknown := [name for name in names if name not in PEERS]:
        parser.error(f"unknown peers {', '.join(unknown)}; there are {', '.join(PEERS)}")
    if options.repeats < 1 or options.seconds <= 0:
        parser.error("--repeats and --seconds must be positive")
    return options, names


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark and print what it found."""
    options, names = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that every `with` ends its children
    with Server() as server:
        version = server.version()
    try:
        outcome = run(options, names)
    except FAILURES as error:
        sys.exit(f"ours or the server failed: {error}")
    found = answer(outcome, options, version)
    rows = {"ours": found, **found["peers"]} if outcome.ours else found["peers"]
    print(report.table(rows))
    print(f"bare loop, 10 ms sleeps: {found['bare_sleep_10ms_per_s']:,.0f}/s", end="; ")
    print(f"bare round trip: p50 {found['bare_round_trip_p50_s'] * 1e3:.3f} ms", end=", ")
    print(f"p99 {found['bare_round_trip_p99_s'] * 1e3:.3f} ms")
    for key, ratio in found["ratios"].items():
        print(f"{key}: {ratio['ratio']:.2f} x {ratio['peer']}")
    for peer, reason in outcome.skipped.items():
        print(f"skipped {peer}: {reason}")
    if options.json:
        print(json.dumps(found))


if __name__ == "__main__":
    main()
