"""What the producers submit: a seeded mix of all that a message can be."""

from __future__ import annotations

import os
from dataclasses import dataclass
from random import Random
from typing import Any

from taskmesh import Priority

LANES = (Priority.HIGH, Priority.NORMAL, Priority.NORMAL, Priority.LOW)
WEIGHTS = {
    "nap": 30,
    "doze": 20,
    "flaky": 10,
    "doomed": 2,
    "crunch": 3,
    "in_thread": 5,
    "grind": 2,
    "carry": 4,
    "brief": 6,
    "silent": 8,
    "novel": 4,
}


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to submit.

    Attributes:
        arguments: those behind the key, for each message of a bulk submission.
        delay: seconds until it is due; None at once.
        cancel_after: seconds after which it is to be cancelled; None never.
    """

    task: str
    arguments: tuple[tuple[Any, ...], ...]
    lane: Priority
    delay: float | None = None
    cancel_after: float | None = None


def next_item(draw: Random) -> Item:
    """The next submission."""
    task = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
    lane = draw.choice(LANES)
    if task in ("nap", "doze", "silent") and draw.random() < 0.15:
        count = draw.randrange(5, 40)
        return Item(task, tuple(_arguments(draw, task) for _ in range(count)), lane)
    delay = draw.uniform(0.05, 1.5) if draw.random() < 0.2 else None
    cancel_after = draw.uniform(0.0, 0.4) if draw.random() < 0.12 else None
    return Item(task, (_arguments(draw, task),), lane, delay, cancel_after)


def _arguments(draw: Random, task: str) -> tuple[Any, ...]:
    match task:
        case "nap" | "doze" | "in_thread":
            return (round(max(0.0, draw.uniform(-0.05, 0.3)), 3),)
        case "crunch" | "grind":
            return (round(draw.uniform(0.01, 0.08), 3),)
        case "flaky":
            return (draw.randrange(1, 4),)
        case "carry":
            return (os.urandom(draw.randrange(80_000, 300_000)),)
        case _:
            return ()
