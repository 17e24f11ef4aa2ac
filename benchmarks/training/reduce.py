"""A step whose gradient the master reduces, and one that workers reduce: on one machine, and with the master far off.

Far off is behind a link that is held to a rate; the servers and the workers are together on its other side.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from benchmarks.training.dense import our_step
from benchmarks.training.fleet import Fleet, step_seconds
from benchmarks.training.namespaces import Link, NoLink, link
from benchmarks.training.plan import Plan
from benchmarks.training.servers import servers

RATE = "1gbit"
FAR = f"master_behind_{RATE}"
PLAN = Plan(work="dense", shards=8, batch=64, workers=2)


def _far_step(here: Link, plan: Plan) -> float:
    """Median seconds of a step whose master is on the right side of the link, and all else on the left."""
    with (
        servers(tcp=True, address=here.left.address, prefix=here.left.prefix) as both,
        Fleet(plan, both) as fleet,
    ):
        for _ in range(plan.workers):
            fleet.worker(prefix=here.left.prefix)
        lasted = step_seconds(fleet.master(prefix=here.right.prefix), plan.steps)
    return statistics.median(lasted[len(lasted) // 3 :])


def measure_reduce(repeats: int, steps: int, parameters: int) -> dict[str, Any]:
    """Medians over the repeats, the sides in turn."""
    plan = msgspec.structs.replace(PLAN, steps=steps, size=parameters)
    by: dict[str, Plan] = {
        "master": msgspec.structs.replace(plan, reduce="master"),
        "workers": msgspec.structs.replace(plan, reduce="workers"),
    }
    setup = {"parameters": parameters, "shards": plan.shards, "workers": plan.workers}
    figures: dict[str, Any] = {"one_machine": _medians(repeats, by, lambda plan: our_step(plan).seconds)}
    try:
        with link(RATE) as here:
            figures[FAR] = _medians(repeats, by, lambda plan: _far_step(here, plan))
    except NoLink as error:
        figures[FAR] = {"skipped": str(error)}
    return {"reduce_step_s": {**figures, "setup": setup}}


def _medians(repeats: int, by: Mapping[str, Plan], measure: Callable[[Plan], float]) -> dict[str, float]:
    found = [{who: measure(plan) for who, plan in by.items()} for _ in range(repeats)]
    return {who: statistics.median(each[who] for each in found) for who in by}
