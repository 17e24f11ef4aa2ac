"""Training:  python -m benchmarks.training [--json] [--quick] [--only STEPS] [--repeats N] [--seed N]

Steps beside DDP over gloo, transport, slow links, stragglers, killed masters and workers, parity. See README.md.
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
import torch

from benchmarks.processes import SideFailed
from benchmarks.servers import Server
from benchmarks.training.steps import STEPS, say, scale_of
from taskmesh import TaskmeshError

FAILURES = (SideFailed, TaskmeshError, redis.RedisError, OSError, AssertionError)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser("python -m benchmarks.training", description="training beside DDP")
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object as the last line of stdout")
    add("--quick", action="store_true", help="everything small: to see that it runs")
    add("--only", default=",".join(STEPS), metavar="STEPS", help=f"of {','.join(STEPS)}")
    add(
        "--repeats",
        type=int,
        metavar="N",
        help="turns of the dense steps; the figures are medians (default 3)",
    )
    add("--seed", type=int, metavar="N", help="of the kills (default 1)")
    options = parser.parse_args(arguments)
    options.only = [name.strip() for name in options.only.split(",") if name.strip()]
    if unknown := [name for name in options.only if name not in STEPS]:
        parser.error(f"unknown steps {', '.join(unknown)}; there are {', '.join(STEPS)}")
    if options.repeats is not None and options.repeats <= 0:
        parser.error("--repeats must be positive")
    return options


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every step that was asked for."""
    scale = scale_of(quick=options.quick, repeats=options.repeats, seed=options.seed)
    found: dict[str, Any] = {}
    for name, step in STEPS.items():
        if name in options.only:
            began = time.monotonic()
            figures = step(scale)
            found |= figures
            say(f"{name} ({time.monotonic() - began:.0f} s): {json.dumps(figures)}")
    with Server() as server:
        found["settings"] = {
            "repeats": scale.repeats,
            "quick": options.quick,
            "server": server.version(),
            "python": platform.python_version(),
            "torch": torch.__version__,
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
