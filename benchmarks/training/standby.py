"""Masters that are killed while another waits: how long until the next commit."""

from __future__ import annotations

import random
import statistics
import time

from benchmarks.training.fleet import Fleet
from benchmarks.training.plan import Plan
from benchmarks.training.servers import servers

LEASE = 2.0
PLAN = Plan(work="augmented", batch=96, workers=2, checkpoint_every=10)


def measure_standby(kills: int, seed: int) -> dict[str, object]:
    """Seconds from SIGKILL of the master to the first commit of its standby, at a lease of 2 s."""
    draw = random.Random(seed)
    taken: list[float] = []
    with servers() as both, Fleet(PLAN, both, LEASE) as fleet:
        for _ in range(2):
            fleet.worker()
        leading = fleet.master()
        leading.until("commit")
        for _ in range(kills):
            waiting = fleet.master()
            waiting.until("ready")
            time.sleep(draw.uniform(0.2, 0.2 + LEASE))  # any moment between two renewals of the lease
            killed = leading.kill()
            taken.append(waiting.until("commit")["at"] - killed)
            leading = waiting
    return {
        "standby_takeover_s": statistics.median(taken),
        "standby_takeover_max_s": max(taken),
        "standby_lease_s": LEASE,
        "standby_kills": kills,
    }
