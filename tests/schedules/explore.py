"""Very many schedules: ``python -m tests.schedules.explore --count 100000 --seed 7``.

A failure is printed with its seed, made smaller, and printed again as Python and as a story. ``--replay SEED``
plays one again.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

from taskmesh.settings import cpu_count
from tests.schedules import mutations
from tests.schedules.generate import seeded
from tests.schedules.node import Backend, new_server
from tests.schedules.play import Broken, Player, play
from tests.schedules.steps import Schedule, Setting

COLLECT_EVERY = 25
SAY_EVERY = 30.0
CHUNK = 250


def smaller(backend: Backend, schedule: Schedule, tries: int = 400) -> Schedule:
    """A schedule that fails as well and has no step too many."""
    best = schedule
    progress = True
    while progress and tries > 0:
        progress = False
        for candidate in _candidates(best):
            tries -= 1
            if tries < 0:
                break
            if fails(backend, candidate):
                best, progress = candidate, True
                break
    return best


def _candidates(schedule: Schedule) -> Iterator[Schedule]:
    setting, steps = schedule.setting, schedule.steps
    size = len(steps) // 2
    while size:
        for first in range(0, len(steps), size):
            yield Schedule(setting, steps[:first] + steps[first + size :])
        size //= 2
    for name, plain in dataclasses.asdict(Setting()).items():
        if getattr(setting, name) != plain:
            yield Schedule(dataclasses.replace(setting, **{name: plain}), steps)
    for place, step in enumerate(steps):
        for simple in (dataclasses.replace(step, points=0), dataclasses.replace(step, seconds=0.0)):
            if simple != step:
                yield Schedule(setting, (*steps[:place], simple, *steps[place + 1 :]))
        for field in dataclasses.fields(step.action):
            value, plain = getattr(step.action, field.name), field.default
            if plain is not dataclasses.MISSING and value != plain:
                action = dataclasses.replace(step.action, **{field.name: plain})
                yield Schedule(
                    setting, (*steps[:place], dataclasses.replace(step, action=action), *steps[place + 1 :])
                )


def fails(backend: Backend, schedule: Schedule) -> str:
    """What is wrong; empty when nothing is."""
    try:
        play(backend, schedule)
    except Broken as broken:
        return str(broken)
    return ""


def story(backend: Backend, schedule: Schedule) -> str:
    """What happens in a schedule, line by line."""
    player = Player(backend, schedule)
    try:
        player.play()
        end = "all is well"
    except Broken as broken:
        end = f"BROKEN: {broken}"
    lines = [f"{at - 1000:9.4f}  {who:<12} {what}" for at, who, what in player.world.trace]
    return "\n".join([*lines, end])


def as_python(schedule: Schedule) -> str:
    steps = "".join(f"        {step!r},\n" for step in schedule.steps)
    return f"Schedule(\n    {schedule.setting!r},\n    (\n{steps}    ),\n)"


def explore(seed: int, first: int, count: int) -> tuple[int, Counter[str], list[str]]:
    """Play so many schedules from a number on; returns how many, what was seen in them, the seeds that failed."""
    seen: Counter[str] = Counter()
    failed: list[str] = []
    with new_server() as server:
        backend = Backend(server.port)
        gc.freeze()
        for number in range(first, first + count):
            name = f"{seed}:{number}"
            try:
                seen.update(play(backend, seeded(name)).model.seen)
            except Broken as broken:
                print(f"seed {name}: {broken}", flush=True)
                failed.append(name)
            if number % COLLECT_EVERY == 0:
                gc.collect()
    return count, seen, failed


def explore_all(seed: int, count: int, processes: int) -> list[str]:
    """Play very many schedules in several processes; returns the seeds that failed."""
    seen: Counter[str] = Counter()
    failed: list[str] = []
    played = 0
    began = said = time.monotonic()
    # A few hundred in a process: what asyncio leaves behind of a loop that was cut off costs time by and by.
    with multiprocessing.Pool(processes, maxtasksperchild=1) as pool:
        jobs = [
            pool.apply_async(explore, (seed, first, min(CHUNK, count - first)))
            for first in range(0, count, CHUNK)
        ]
        for job in jobs:
            part, what, wrong = job.get()
            played += part
            seen.update(what)
            failed += wrong
            if time.monotonic() - said > SAY_EVERY:
                said = time.monotonic()
                print(f"{played} of {count} in {said - began:.0f} s, {len(failed)} failed", flush=True)
    print(f"{played} schedules in {time.monotonic() - began:.0f} s; {len(failed)} failed")
    print("seen:", ", ".join(f"{what} {number}" for what, number in seen.most_common()))
    return failed


def report(name: str) -> int:
    """Print the story of a schedule, made as small as it gets if it fails; returns the exit code."""
    with new_server() as server:
        backend = Backend(server.port)
        schedule = seeded(name)
        has_failed = bool(fails(backend, schedule))
        if has_failed:
            schedule = smaller(backend, schedule)
        print(story(backend, schedule))
        print(as_python(schedule))
    return int(has_failed)


def find_faults(seed: int, count: int) -> int:
    """Look for each of the faults of ``mutations.py`` in so many schedules; returns how many were not found."""
    missed = 0
    with new_server() as server:
        for name in [*mutations.LUA, *mutations.ENGINE]:
            backend = Backend(server.port, mutations.LUA.get(name))
            with mutations.in_engine(name) if name in mutations.ENGINE else nullcontext():
                found = first_failure(backend, str(seed), count)
            print(f"{name}: {found or 'NOT FOUND'}", flush=True)
            missed += not found
            backend.close()
    return missed


def first_failure(backend: Backend, seed: str, count: int) -> str:
    """The first of so many schedules that fails, and why; empty when none does."""
    for number in range(count):
        if why := fails(backend, seeded(f"{seed}:{number}")):
            return f"schedule {seed}:{number}: {why}"
        if number % COLLECT_EVERY == 0:
            gc.collect()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--processes", type=int, default=cpu_count())
    parser.add_argument("--replay", default="", metavar="SEED:NUMBER")
    parser.add_argument(
        "--mutations", action="store_true", help="look for known faults, --count schedules for each"
    )
    options = parser.parse_args()
    if options.replay:
        return report(options.replay)
    print("seed", options.seed, flush=True)
    if options.mutations:
        return find_faults(options.seed, options.count)
    failed = explore_all(options.seed, options.count, options.processes)
    return report(failed[0]) if failed else 0


if __name__ == "__main__":
    sys.exit(main())
