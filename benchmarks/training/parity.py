"""What compression costs: final validation losses, by pairs with no compression. And what it saves.

On digits, and on a small transformer that reads Python's own source. The runs for quality have their worker in this
process; those for bytes have workers of their own and over a million parameters, as few bytes are of interest.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import msgspec
import uvloop
from scipy import stats  # type: ignore[import-untyped]

from benchmarks.training.fleet import Fleet
from benchmarks.training.plan import COMPRESSIONS as COMPRESSIONS_BY_NAME
from benchmarks.training.plan import Plan
from benchmarks.training.servers import Servers, servers
from benchmarks.training.works import make_trainer, make_work
from taskmesh import Mesh, MeshSettings, WorkerSettings

PLAIN = "none"
COMPRESSIONS = tuple(name for name in COMPRESSIONS_BY_NAME if name != PLAIN)
Figures = dict[str, Any]
MARGIN = 0.05  # of the plain runs' mean loss, by which a compressed run may be worse
QUALITY = {
    "digits": Plan(work="digits", size=32, shards=8, batch=128),
    "tiny_gpt": Plan(work="tiny_gpt", size=64, shards=4, batch=8),
}
SAVINGS = Plan(work="digits", size=1024, shards=8, batch=256, workers=2, steps=6, meter=True)


async def _final_loss(plan: Plan, both: Servers) -> float:
    settings = MeshSettings(url=both.durable, bulk_url=both.bulk)
    mesh = Mesh(plan.name, settings=settings)
    work = make_work(plan)
    trainer = make_trainer(mesh, plan, work)
    assert work.validate is not None
    async with mesh.worker(WorkerSettings(concurrency=2)):
        await trainer.run(steps=plan.steps)
        return work.validate(await trainer.load())


async def _losses(
    both: Servers, work: str, names: Sequence[str], seeds: int, steps: int
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in names}
    for seed in range(seeds):
        for place, name in enumerate(names):
            plan = msgspec.structs.replace(
                QUALITY[work], seed=seed, steps=steps, compression=name, name=f"{work}-{seed}-{place}"
            )
            found[name].append(await _final_loss(plan, both))
    return found


def _bytes_a_step(name: str) -> tuple[float, float]:
    """Of the uplink, and all that the servers received and sent."""
    with servers() as both, Fleet(msgspec.structs.replace(SAVINGS, compression=name), both) as fleet:
        for _ in range(SAVINGS.workers):
            fleet.worker()
        master = fleet.master()
        commits = [master.until("commit") for _ in range(SAVINGS.steps - 1)]  # the last is a checkpoint
        master.until("finished")
    moved = commits[-1]["moved"] - commits[0]["moved"]
    return statistics.fmean(line["uplink_bytes"] for line in commits), moved / (len(commits) - 1)


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Of the mean, 95%, by Student's t."""
    middle = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    reach = float(stats.t.ppf(0.975, len(differences) - 1)) * error
    return middle - reach, middle + reach


def _compare(work: str, names: Sequence[str], seeds: int, steps: int) -> tuple[Figures, Figures]:
    """Each compression against none, and what that means."""
    with servers() as both:
        losses = uvloop.run(_losses(both, work, (PLAIN, *names), seeds, steps))
    plain = statistics.fmean(losses[PLAIN])
    margin = MARGIN * plain
    figures: Figures = {}
    for name in names:
        differences = [one - other for one, other in zip(losses[name], losses[PLAIN], strict=True)]
        low, high = interval(differences)
        figures[name] = {
            "mean_difference": statistics.fmean(differences),
            "interval": [low, high],
            "is_within_margin": high <= margin,
        }
    return figures, {"plain_loss": plain, "margin": margin, "seeds": seeds, "steps": steps}


def measure_parity(seeds: int, steps: int, compressions: Sequence[str] = COMPRESSIONS) -> Figures:
    """Each compression against none, on each work."""
    figures, setup = _compare("digits", compressions, seeds, steps)
    dense_uplink, dense_total = _bytes_a_step(PLAIN)
    for name in compressions:
        uplink, total = _bytes_a_step(name)
        figures[name] |= {"uplink_saved": 1 - uplink / dense_uplink, "total_saved": 1 - total / dense_total}
    others, other_setup = _compare("tiny_gpt", compressions, seeds, steps)
    return {
        "parity": figures,
        "parity_setup": setup,
        "parity_tiny_gpt": others,
        "parity_tiny_gpt_setup": other_setup,
    }
