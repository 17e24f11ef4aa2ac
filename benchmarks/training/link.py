"""tiny_gpt over a slow link: seconds and bytes until the validation loss that DDP fp32 has after so many steps.

On the left the two servers, the master and a worker, on the right a worker. Of DDP a rank on each side.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from benchmarks.training.fleet import Fleet
from benchmarks.training.group import Place, group
from benchmarks.training.lines import Line, Program
from benchmarks.training.namespaces import Link, NoLink, link
from benchmarks.training.plan import Chase, Plan, Ranks
from benchmarks.training.servers import servers

RATES = {"100mbit": "100mbit", "1gbit": "1gbit"}
HOOKS = ("fp16", "powersgd")
# Two shards, since the uplink is shards x size.
OURS = Plan(work="tiny_gpt", shards=2, batch=16, workers=2)
CHOSEN = {"100mbit": "lowrank_8", "1gbit": "int8"}  # both ways, as one would for such a link
PATIENCE_FACTOR = 4  # a side that has not arrived after so many times DDP's steps never does


def _follow(program: Program, steps: int, every: int, target: float | None) -> list[Line]:
    """The evaluations of a run until it arrives, or is over."""
    lines: list[Line] = []
    while len(lines) < steps // every:
        lines.append(program.until("evaluated", 300.0))
        if lines[-1]["arrived"] and target is not None:
            break
    return lines


def run_ddp(here: Link, plan: Plan, hook: str, target: float | None) -> list[Line]:
    """The evaluations of one DDP run."""
    chase = Chase(target, interface=here.left.interface)
    ranks = Ranks(msgspec.structs.replace(plan, chase=chase), hook, host=here.left.address)
    with group(ranks, [Place(side.interface, side.prefix) for side in here]) as first:
        return _follow(first, plan.steps, chase.every, target)


def run_ours(here: Link, plan: Plan, target: float) -> list[Line]:
    """The evaluations of one of our runs."""
    chase = Chase(target, interface=here.left.interface)
    with (
        servers(tcp=True, address=here.left.address, prefix=here.left.prefix) as both,
        Fleet(msgspec.structs.replace(plan, chase=chase), both) as fleet,
    ):
        for side in here:
            fleet.worker(prefix=side.prefix)
        master = fleet.master(prefix=here.left.prefix)
        return _follow(master, plan.steps, chase.every, target)


def _arrival(lines: Sequence[Line], target: float) -> dict[str, float | None]:
    """Where the first evaluation at or below the target was."""
    for line in lines:
        if line["loss"] <= target:
            found = {key: line[key] for key in ("seconds", "bytes_up", "bytes_down")}
            return {"seconds_to_loss": found.pop("seconds"), **found, "steps": line["evaluated"]}
    return {"seconds_to_loss": None, "bytes_up": None, "bytes_down": None, "steps": None}


def _one_seed(here: Link, chosen: str, steps: int, seed: int) -> dict[str, dict[str, float | None]]:
    plan = msgspec.structs.replace(OURS, seed=seed, steps=steps, compression=chosen, downlink=chosen)
    plain = run_ddp(here, plan, "none", None)
    target = plain[-1]["loss"]
    patient = msgspec.structs.replace(plan, steps=PATIENCE_FACTOR * steps)
    found = {"ours": _arrival(run_ours(here, patient, target), target), "ddp_fp32": _arrival(plain, target)}
    for hook in HOOKS:
        found[f"ddp_{hook}"] = _arrival(run_ddp(here, patient, hook, target), target)
    for arrival in found.values():
        arrival["target"] = target
    return found


def _median(arrivals: Sequence[dict[str, float | None]]) -> dict[str, float | None]:
    """Of each figure over the seeds; None where a seed never arrived."""
    figures: dict[str, float | None] = {}
    for key in arrivals[0]:
        values = [value for arrival in arrivals if (value := arrival[key]) is not None]
        figures[key] = statistics.median(values) if len(values) == len(arrivals) else None
    return figures


def measure_link(rates: Sequence[str], seeds: int, steps: int) -> dict[str, object]:
    """Medians over the seeds, the sides in turn."""
    figures: dict[str, object] = {}
    try:
        for rate in rates:
            with link(RATES[rate]) as here:
                found = [_one_seed(here, CHOSEN[rate], steps, seed) for seed in range(seeds)]
            figures[rate] = {side: _median([one[side] for one in found]) for side in found[0]}
    except NoLink as error:
        return {"link": {"skipped": str(error)}}
    setup = {"ddp_steps": steps, "seeds": seeds, "ours_both_ways": CHOSEN}
    return {"link": {**figures, "setup": setup}}
