"""One step of a dense model on loopback: ours, plain and with int8, and DDP's."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.training.fleet import Fleet, step_seconds
from benchmarks.training.group import group
from benchmarks.training.plan import Plan, Ranks
from benchmarks.training.servers import servers
from benchmarks.training.stopwatch import read_parts

PARAMETERS = 10_000_000
WORKERS = 2
PLAN = Plan(work="dense", size=PARAMETERS, shards=WORKERS, batch=32 * WORKERS, workers=WORKERS)


class Step(NamedTuple):
    """Median seconds of a step, and of its parts."""

    seconds: float
    parts: dict[str, float]


def our_step(plan: Plan, *, tcp: bool = False) -> Step:
    """Of the last two thirds of the plan's steps, from commit to commit."""
    with servers(tcp=tcp) as both, tempfile.TemporaryDirectory(prefix="bench-marks-") as folder:
        marks = Path(folder, "marks")
        with Fleet(msgspec.structs.replace(plan, marks=str(marks)), both) as fleet:
            for _ in range(plan.workers):
                fleet.worker()
            lasted = step_seconds(fleet.master(), plan.steps)
        return Step(statistics.median(lasted[len(lasted) // 3 :]), read_parts(marks))


def ddp_step(plan: Plan) -> Step:
    """The same with DDP."""
    with group(Ranks(plan)) as first:
        found: dict[str, float] = first.until("measured")["measured"]
    return Step(found.pop("step_s"), found)


def measure_dense(repeats: int, steps: int, parameters: int = PARAMETERS) -> dict[str, object]:
    """Medians over the repeats, the sides in turn."""
    plan = msgspec.structs.replace(PLAN, steps=steps, size=parameters)
    sides: dict[str, Callable[[], Step]] = {
        "dense": lambda: our_step(plan),
        "dense_tcp": lambda: our_step(plan, tcp=True),
        "int8": lambda: our_step(msgspec.structs.replace(plan, compression="int8")),
        "ddp": lambda: ddp_step(plan),
    }
    found: dict[str, list[Step]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, measure in sides.items():
            found[name].append(measure())
    figures: dict[str, object] = {}
    for name, repeated in found.items():
        figures[f"{name}_step_s"] = statistics.median(step.seconds for step in repeated)
        figures[f"{name}_parts_s"] = {
            part: statistics.median(step.parts[part] for step in repeated) for part in repeated[0].parts
        }
    ddp = statistics.median(step.seconds for step in found["ddp"])
    for name in ("dense", "dense_tcp", "int8"):
        figures[f"{name}_by_ddp"] = statistics.median(step.seconds for step in found[name]) / ddp
    size = {"parameters": parameters, "workers": WORKERS, "shards": plan.shards, "batch": plan.batch}
    return {**figures, "dense_setup": size}
