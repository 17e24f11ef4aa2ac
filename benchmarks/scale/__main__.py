"""The scale model:  python -m benchmarks.scale [--json] [--quick] [--stored FILE | --save FILE] [--picture FILE]

Measures the parts of a step and whole steps on 1 to 3 workers, fits a model, holds it against runs that it has not
seen, and predicts steps of up to 1,000 workers. docs/scale.md says what to make of it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
import redis

from benchmarks.processes import SideFailed
from benchmarks.scale.measure import measure, model_of, read, write
from benchmarks.scale.report import figures, in_words
from benchmarks.scale.settings import FULL, QUICK
from taskmesh import TaskmeshError

FAILURES = (SideFailed, TaskmeshError, redis.RedisError, OSError, msgspec.MsgspecError)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser("python -m benchmarks.scale", description="a model of steps at scale")
    add = parser.add_argument
    add("--json", action="store_true", help="one JSON object as the last line of stdout")
    add("--quick", action="store_true", help="few and small runs: to see that it works")
    add("--stored", type=Path, metavar="FILE", help="measure nothing: what an earlier run saved")
    add("--save", type=Path, metavar="FILE", help="keep what was measured")
    add("--picture", type=Path, metavar="FILE", help="draw the curves (.svg or .png; needs matplotlib)")
    options = parser.parse_args(arguments)
    if options.stored and (options.save or options.quick):
        parser.error("--stored measures nothing: --save and --quick do not go with it")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it and print what it found."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that every `with` ends its children
    try:
        measured = read(options.stored) if options.stored else measure(QUICK if options.quick else FULL)
        if options.save:
            write(measured, options.save)
    except FAILURES as error:
        sys.exit(f"failed: {error}")
    model = model_of(measured)
    if options.picture:
        from benchmarks.scale.picture import draw  # matplotlib is needed for nothing else

        draw(model, options.picture)
    print(json.dumps(figures(model)) if options.json else in_words(model))


if __name__ == "__main__":
    main()
