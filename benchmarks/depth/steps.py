"""The steps of the run, each with its own keys, in two sizes."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import environments
from benchmarks.depth import wire
from benchmarks.depth.balance import measure_balance
from benchmarks.depth.beside import TTL, Load, loads, measure_beside, measure_takeover
from benchmarks.depth.beside import Scale as BesideScale
from benchmarks.depth.drains import drain_rate
from benchmarks.depth.recovery import measure_recovery
from benchmarks.depth.soak import soak
from benchmarks.measure import Bench
from benchmarks.measure import Scale as DrainScale
from benchmarks.processes import SideFailed
from benchmarks.sides import PEERS, Side

Figures = dict[str, Any]
PEER_FAILURES = (SideFailed, environments.InstallFailed, OSError)


@dataclass(frozen=True)
class Scale:
    """How much is measured; `--quick` makes it small."""

    repeats: int = 3
    drained: int = 200_000
    deep: int = 1_000_000
    wire_seconds: float = 4.0  # that a drain through the proxy lasts
    beside: BesideScale = field(default_factory=BesideScale)
    ttls: tuple[float, ...] = (1.0, 2.0)
    kills: int = 24
    balance_tasks: int = 60_000
    partitions: tuple[int, ...] = (3, 12, 48)
    soak_minutes: float = 10.0
    soak_rate_seconds: float = 4.0


QUICK = Scale(
    repeats=1,
    drained=20_000,
    deep=100_000,
    wire_seconds=0.6,
    beside=BesideScale(Load(5_000, 5_000, 50), drain=20_000, round_trips=50, idle_seconds=1.0),
    ttls=(1.0,),
    kills=3,
    balance_tasks=3_000,
    partitions=(12,),
    soak_minutes=0.2,
    soak_rate_seconds=0.6,
)


@dataclass(frozen=True)
class Run:
    """What the steps share."""

    scale: Scale
    side: Side
    peers: Sequence[str]

    def median(self, measure: Callable[[], float]) -> float:
        """The median of the repeats."""
        return statistics.median(measure() for _ in range(self.scale.repeats))


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the answer."""
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="bench-depth-") as name:
        yield Path(name)


def backlog(run: Run) -> Figures:
    """A part of a long backlog, and the same number when nothing lies behind it; in turn."""
    scale = run.scale
    alone, deep = [], []
    with _folder() as folder:
        for _ in range(scale.repeats):
            alone.append(drain_rate(run.side, folder, scale.drained))
            deep.append(drain_rate(run.side, folder, scale.deep, scale.drained))
    low, high = statistics.median(alone), statistics.median(deep)
    return {"drain_per_s_200k": low, "drain_per_s_1m": high, "drain_1m_by_200k": high / low}


def longer_wire(run: Run) -> Figures:
    """Ours without a proxy and through one with a round trip of 0 and of 2 ms, in turn; the peers at 2 ms."""
    with _folder() as folder:
        count = wire.calibrate(run.side, folder, run.scale.wire_seconds)
        rates: dict[float | None, list[float]] = {None: [], 0.0: [], wire.ROUND_TRIP: []}
        for _ in range(run.scale.repeats):
            for round_trip, found in rates.items():
                found.append(wire.drain_through(run.side, folder, count, round_trip))
        direct, near, far = (statistics.median(found) for found in rates.values())
        peers, skipped = _peers_at_2ms(run, folder)
    proxy = wire.measure_wire(wire.ROUND_TRIP)
    return {
        "drain_per_s_direct": direct,
        "drain_per_s_rtt_0": near,
        "drain_per_s_rtt_2ms": far,
        "drain_rtt_2ms_by_rtt_0": far / near,
        "peers_rtt_2ms": dict(sorted(peers.items(), key=lambda item: -item[1])),
        "peers_skipped": skipped,
        "proxy_ping_p50_s": proxy.ping_p50_s,
        "proxy_mb_per_s": proxy.mb_per_s,
    }


def _peers_at_2ms(run: Run, folder: Path) -> tuple[dict[str, float], dict[str, str]]:
    found: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for name in run.peers:
        try:
            side = PEERS[name]
            side.python()
            count = wire.calibrate(side, folder, run.scale.wire_seconds)
            found[name] = run.median(lambda: wire.drain_through(side, folder, count, wire.ROUND_TRIP))  # noqa: B023
            say(f"  {name}: {found[name]:,.0f}/s")
        except PEER_FAILURES as error:
            skipped[name] = str(error)
            say(f"  {name}: skipped, {error}")
    return found, skipped


def beside_much(run: Run) -> Figures:
    """What delayed messages, held entries and many workers cost, each alone and together, and a takeover."""
    scale = run.scale.beside
    kinds = loads(scale.load)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in kinds}
    with _folder() as folder:
        for _ in range(run.scale.repeats):
            for name, load in kinds.items():
                found[name].append(measure_beside(run.side, folder, scale, load))
        takeover = measure_takeover(run.side, folder, scale.load.held)
    figures = {name: _medians(repeats) for name, repeats in found.items()}
    plain = figures["nothing"]["drain_per_s"]
    for one in figures.values():
        one["drain_by_nothing"] = one["drain_per_s"] / plain
    load = scale.load
    what = {"delayed": load.delayed, "held": load.held, "workers": load.workers, "ttl_s": TTL}
    return {"beside": figures, "beside_load": what, "takeover": takeover}


def _medians(repeats: Sequence[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(repeat[key] for repeat in repeats) for key in repeats[0]}


def recovery(run: Run) -> Figures:
    """Restarts after kills: the shortest TTL under the key asked for, the others beside it."""
    found = [measure_recovery(ttl, run.scale.kills) for ttl in run.scale.ttls]
    figures: Figures = {"recovery_after_kill_s": found[0]}
    return figures | {f"recovery_after_kill_ttl_{one['ttl_s']:g}_s": one for one in found[1:]}


def balance(run: Run) -> Figures:
    """Operations by node of a 3-node cluster; the largest number of partitions under the key itself."""
    found = [measure_balance(number, run.scale.balance_tasks) for number in run.scale.partitions]
    by_partitions = {str(one.partitions): one.max_by_mean for one in found}
    return {"partition_balance": {**found[-1].as_json(), "max_by_mean_by_partitions": by_partitions}}


def soaked(run: Run) -> Figures:
    """Growth of memory at half of the rate that a drain with results has here and now."""
    with _folder() as folder:
        bench = Bench(run.side, DrainScale(seconds=run.scale.soak_rate_seconds), folder)
        rate = bench.drain("drain_results").per_s
    return {"soak": {**soak(run.scale.soak_minutes, rate / 2), "measured_per_s": rate}}


STEPS: dict[str, Callable[[Run], Figures]] = {
    "backlog": backlog,
    "wire": longer_wire,
    "beside": beside_much,
    "recovery": recovery,
    "balance": balance,
    "soak": soaked,
}


def scale_of(*, quick: bool, repeats: int | None, soak_minutes: float | None, kills: int | None) -> Scale:
    """The size that the options ask for."""
    scale = QUICK if quick else Scale()
    return replace(
        scale,
        repeats=repeats or scale.repeats,
        soak_minutes=soak_minutes or scale.soak_minutes,
        kills=kills or scale.kills,
    )
