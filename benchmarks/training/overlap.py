"""How much of a step's communication is hidden behind its computation, over a link held to a rate.

One worker on the right side of the link computes one shard a step; once as it is, and once with its buckets held back
until backward is over. The same worker on the left, beside the servers, has next to no communication.
"""

from __future__ import annotations

import statistics
from typing import Any

import msgspec
from torch import Tensor

from benchmarks.training.fleet import Fleet, step_seconds
from benchmarks.training.namespaces import Link, NoLink, Side, link
from benchmarks.training.plan import Plan
from benchmarks.training.servers import servers
from taskmesh.training.worker.backward import Backward

RATE = "1gbit"
PLAN = Plan(work="dense", shards=1, batch=256, workers=1)


def hold_buckets() -> None:
    """From now on no bucket leaves this process before backward is over."""

    def keep(self: Backward, number: int, _: Tensor) -> None:
        self._flat.collect_gradient_of(number)

    Backward._on_gradient = keep  # type: ignore[method-assign]


def _step(here: Link, worker: Side, plan: Plan) -> float:
    """Median seconds of a step with the worker on that side."""
    with (
        servers(tcp=True, address=here.left.address, prefix=here.left.prefix) as both,
        Fleet(plan, both) as fleet,
    ):
        fleet.worker(prefix=worker.prefix)
        lasted = step_seconds(fleet.master(prefix=here.left.prefix), plan.steps)
    return statistics.median(lasted[len(lasted) // 3 :])


def measure_overlap(repeats: int, steps: int, parameters: int) -> dict[str, Any]:
    """The share (README.md has the formula), medians over the repeats, in turn."""
    plan = msgspec.structs.replace(PLAN, steps=steps, size=parameters)
    held = msgspec.structs.replace(plan, hold=True)
    found: dict[str, list[float]] = {"after": [], "overlapped": [], "without": []}
    try:
        with link(RATE) as here:
            for _ in range(repeats):
                found["after"].append(_step(here, here.right, held))
                found["overlapped"].append(_step(here, here.right, plan))
                found["without"].append(_step(here, here.left, held))
    except NoLink as error:
        return {"hidden_communication_share": None, "hidden_communication": {"skipped": str(error)}}
    after, overlapped, without = (statistics.median(each) for each in found.values())
    return {
        "hidden_communication_share": (after - overlapped) / (after - without),
        "hidden_communication": {
            "step_after_s": after,
            "step_overlapped_s": overlapped,
            "step_without_s": without,
            "rate": RATE,
            "parameters": parameters,
        },
    }
