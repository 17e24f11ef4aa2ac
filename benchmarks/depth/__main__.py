"""Load and depth:  python -m benchmarks.depth [--json] [--quick] [--only STEPS] [--peers NAMES] [--soak-minutes M]

Long backlogs, 2 ms of added round trip, much beside the work, kills, partitions, a soak. See README.md for each figure.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

import redis

from benchmarks.depth.steps import STEPS, Run, say, scale_of
from benchmarks.processes import SideFailed
from benchmarks.servers import Server
from benchmarks.sides import PEERS, ours

FAILURES = (SideFailed, redis.RedisError, OSError, AssertionError)


def _names(text: str) -> list[str]:
    return [] if text == "none" else [name.strip() for name in text.split(",") if name.strip()]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser("python -m benchmarks.depth", description="load and depth")
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object as the last line of stdout")
    add("--quick", action="store_true", help="everything small: to see that it runs")
    add("--only", type=_names, default=list(STEPS), metavar="STEPS", help=f"of {','.join(STEPS)}")
    add("--peers", type=_names, default=list(PEERS), metavar="NAMES", help="at 2 ms, or none (default: all)")
    add("--repeats", type=int, metavar="N", help="turns; the figures are medians (default 3)")
    add("--kills", type=int, metavar="N", help="workers killed at each TTL (default 24)")
    add("--soak-minutes", type=float, metavar="M", help="without the warm-up (default 10)")
    options = parser.parse_args(arguments)
    for name, chosen, known in (("steps", options.only, STEPS), ("peers", options.peers, PEERS)):
        if unknown := [one for one in chosen if one not in known]:
            parser.error(f"unknown {name} {', '.join(unknown)}; there are {', '.join(known)}")
    for name in ("repeats", "kills", "soak_minutes"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be positive")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every step that was asked for."""
    side = ours()
    assert side is not None
    scale = scale_of(
        quick=options.quick,
        repeats=options.repeats,
        soak_minutes=options.soak_minutes,
        kills=options.kills,
    )
    run = Run(scale, side, options.peers)
    found: dict[str, Any] = {}
    for name, step in STEPS.items():
        if name in options.only:
            began = time.monotonic()
            figures = step(run)
            found |= figures
            say(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(figures)}")
    with Server() as server:
        found["settings"] = {
            "repeats": scale.repeats,
            "quick": options.quick,
            "server": server.version(),
            "python": platform.python_version(),
            "cpus": os.cpu_count(),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it and print what it found."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that every `with` ends its children
    try:
        found = measure(options)
    except FAILURES as error:
        sys.exit(f"failed: {error}")
    print(json.dumps(found) if options.json else json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
