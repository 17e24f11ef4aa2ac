"""Workers of unlike speed: how much longer a step takes than if the work could be divided without a remainder."""

from __future__ import annotations

import statistics

from benchmarks.training.fleet import Fleet, step_seconds
from benchmarks.training.plan import Plan
from benchmarks.training.servers import servers
from benchmarks.training.works import NAP

SLOWNESS = (1.0, 1.0, 10.0, 10.0)
BACKUPS = 2


def measure_step(shards: int, steps: int, backups: int) -> float:
    """Median seconds of a step, by total work / sum of speeds; the first step is left out."""
    plan = Plan(
        work="naps", shards=shards, batch=2 * shards, steps=steps, workers=len(SLOWNESS), backups=backups
    )
    with servers() as both, Fleet(plan, both) as fleet:
        for slowness in SLOWNESS:
            fleet.worker(slowness=slowness)
        lasted = step_seconds(fleet.master(), steps)
    ideal = shards * NAP / sum(1 / slowness for slowness in SLOWNESS)
    return statistics.median(lasted) / ideal


def measure_stragglers(shards_per_worker: tuple[int, ...], steps: int) -> dict[str, object]:
    """The ratio with each number of shards, with backups and without; the key has that of the last, with them."""
    ratios = {
        backups: {str(each): measure_step(each * len(SLOWNESS), steps, backups) for each in shards_per_worker}
        for backups in (BACKUPS, 0)
    }
    return {
        "straggler_ratio": list(ratios[BACKUPS].values())[-1],
        "straggler_ratio_by_shards_per_worker": ratios[BACKUPS],
        "straggler_ratio_without_backups": ratios[0],
    }
