"""The chaos run:  python -m benchmarks.chaos --seconds 60 --seed N --topology embedded|single|sentinel|cluster

Exits with 1 when a message was lost or settled twice, or something else was promised and not kept; each such message is
told with its whole history.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
from pathlib import Path

from benchmarks.chaos.report import as_json, in_words
from benchmarks.chaos.run import Options, prefer, run, start_logging
from benchmarks.chaos.schedule import TOPOLOGIES


def read_options() -> tuple[Options, bool]:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults go on")
    parser.add_argument("--seed", type=int, help="the same seed gives the same schedule of faults")
    parser.add_argument("--topology", choices=TOPOLOGIES, default="single")
    parser.add_argument("--primary-loss", action="store_true", help="primaries are killed and stopped, too")
    parser.add_argument("--kind", choices=("redis", "valkey"), help="the server program")
    parser.add_argument("--keep", type=Path, help="leave ledgers, logs and the servers' files in this folder")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line of stdout")
    given = parser.parse_args()
    if given.primary_loss and given.topology in ("embedded", "single"):
        parser.error("--primary-loss needs a topology with replicas: sentinel or cluster")
    seed = random.randrange(1 << 31) if given.seed is None else given.seed
    options = Options(seed, given.seconds, given.topology, given.primary_loss, given.kind, keep=given.keep)
    return options, given.json


async def main(options: Options, wants_json: bool) -> int:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    report = await run(options)
    print(in_words(report), file=sys.stderr if wants_json else sys.stdout, flush=True)
    if wants_json:
        print(as_json(report), flush=True)
    return 1 if report.account.problems else 0


if __name__ == "__main__":
    options, wants_json = read_options()
    start_logging()
    print(f"seed {options.seed}", file=sys.stderr, flush=True)
    if options.topology == "embedded":
        prefer(options.kind)
    sys.exit(asyncio.run(main(options, wants_json)))
