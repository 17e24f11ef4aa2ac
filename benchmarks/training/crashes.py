"""The crash matrix: one run comes to the same bits with any number of workers, after kills, and after a rollback.

It is played twice: with whole gradients, and with sparse ones, whose workers remember what they did not send.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from benchmarks.processes import SideFailed
from benchmarks.training.fleet import Fleet
from benchmarks.training.lines import Line, Program
from benchmarks.training.plan import Plan
from benchmarks.training.servers import Servers, servers

TTL = 1.0
STEPS = 100
PLAN = Plan(work="augmented", batch=96, steps=STEPS, checkpoint_every=10)
WORKERS = (1, 2, 3, 5)
SERIES = {
    "crash_matrix": "none",
    "crash_matrix_topk": "topk_10%",
}  # the second remembers, with error feedback
Victim = Literal["worker", "master"]


class Case(NamedTuple):
    """``at`` is the moment of the kill, as a share of the time that the run takes undisturbed."""

    workers: int
    victim: Victim | None = None
    at: float = 0.0
    go_back: tuple[int, int] | None = None

    def __str__(self) -> str:
        if self.victim is not None:
            return f"{self.workers} workers, {self.victim} killed at {self.at:.3f}"
        return f"{self.workers} workers" + (", rolled back" if self.go_back else "")


class Outcome(NamedTuple):
    """How a run ended; ``seconds`` from its first commit to its end."""

    case: Case
    digest: str
    seconds: float
    struck: bool
    last: Line


def cases(kills: int, seed: int, steps: int) -> Iterator[Case]:
    """Each number of workers undisturbed; a rollback; kills at drawn moments, of a worker and the master in turn."""
    for workers in WORKERS:
        yield Case(workers)
    yield Case(2, go_back=(steps * 3 // 4, steps // 2 // 10 * 10))
    draw = random.Random(seed)
    for number in range(kills):
        yield Case(2, "master" if number % 2 else "worker", draw.random())


def play(case: Case, plan: Plan, both: Servers, undisturbed: float) -> Outcome:
    """One run."""
    plan = msgspec.structs.replace(plan, workers=case.workers, go_back=case.go_back)
    with Fleet(plan, both, TTL) as fleet:
        workers = [fleet.worker() for _ in range(case.workers)]
        master = leading = fleet.master()
        if case.victim == "master":
            leading.until("leads")
            master = fleet.master()  # the standby
        began = leading.until("commit")["at"]
        struck = False
        if case.victim is not None:
            victim = leading if case.victim == "master" else workers[0]
            struck = _kill(victim, began + case.at * undisturbed)
        last = master.until("finished")
        return Outcome(case, last["digest"], time.monotonic() - began, struck, last)


def _kill(victim: Program, moment: float) -> bool:
    """Kill a process at that moment; False if it has ended before."""
    time.sleep(max(0.0, moment - time.monotonic()))
    was_running = victim.is_running
    victim.kill()
    return was_running


def measure_crashes(kills: int, seed: int, steps: int = STEPS) -> dict[str, object]:
    """Hashes of the parameters after the last step, by series, and what the ledgers of all say."""
    found: dict[str, object] = {}
    told: Counter[str] = Counter()
    with servers() as both:
        for name, compression in SERIES.items():
            plan = msgspec.structs.replace(PLAN, steps=steps, compression=compression)
            outcomes = list(_play_all(plan, both, kills, seed))
            found[name] = _summary(outcomes, steps, seed)
            for key in ("committed_twice", "never_committed"):
                told[key] += sum(outcome.last[key] for outcome in outcomes)
    return {**found, "ledger": dict(told)}


def _play_all(plan: Plan, both: Servers, kills: int, seed: int) -> Iterator[Outcome]:
    """Every case of one series."""
    undisturbed = 0.0
    for number, case in enumerate(cases(kills, seed, plan.steps)):
        named = msgspec.structs.replace(plan, name=f"crash-{plan.compression.rstrip('%')}-{number}")
        try:
            outcome = play(case, named, both, undisturbed)
        except SideFailed as error:
            raise SideFailed(f"{plan.compression}, {case} (seed {seed}): {error}") from error
        if case.victim is None and case.workers == 2 and case.go_back is None:
            undisturbed = outcome.seconds
        yield outcome


def _summary(outcomes: Sequence[Outcome], steps: int, seed: int) -> dict[str, object]:
    digests = [outcome.digest for outcome in outcomes]
    return {
        "runs": len(outcomes),
        "distinct_hashes": len(set(digests)),
        "kills": sum(outcome.case.victim is not None for outcome in outcomes),
        "struck": sum(outcome.struck for outcome in outcomes),
        "steps": steps,
        "seed": seed,
        "unlike_the_first": [str(outcome.case) for outcome in outcomes if outcome.digest != digests[0]],
    }
