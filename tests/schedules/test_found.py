"""Schedules that broke a promise once, made plain: none of them does again."""

from __future__ import annotations

import pytest

from tests.schedules.explore import fails
from tests.schedules.generate import seeded
from tests.schedules.node import Backend
from tests.schedules.steps import (
    Block,
    Bulk,
    Crash,
    Finish,
    Plan,
    Schedule,
    SetTrap,
    Stall,
    Start,
    Step,
    Submit,
)


def _given_away_and_back(*more: Step) -> Schedule:
    """A worker gives an entry away, is not told so for seconds, and claims it from the taker, which has died."""
    return Schedule(
        steps=(
            Step(Start()),
            Step(Start(knows=1)),
            Step(Block(worker=0, seconds=0.9), seconds=1.2),
            Step(SetTrap("settle", when="after", effect="cut")),
            *(Step(SetTrap("settle", effect="refuse", skip=1)),) * 8,
            *more,
            Step(Submit(Plan("retried")), seconds=0.6),
            Step(Crash(worker=0), seconds=0.1),
            Step(Finish(), seconds=3.0),
        )
    )


FOUND = {
    # What was claimed from a dead worker was given back to it, again and again: each time a death that counted.
    "dead, and the only one that those who claim know of": Schedule(
        steps=(
            Step(Bulk(Plan("retried"), count=3), seconds=0.1),
            Step(SetTrap("fetch", when="after", effect="crash")),
            Step(Start(concurrency=4)),
            Step(Start(concurrency=2, knows=1), seconds=0.1),
            Step(Start(concurrency=4), seconds=0.1),
            Step(Finish(), seconds=3.0),
        )
    ),
    # It took the claimed entry for the one whose settle was under way, and never ran it.
    "given away, and claimed without hearing of it": _given_away_and_back(
        Step(SetTrap("claim", when="after", effect="cut", skip=1))
    ),
    "given away, and claimed": _given_away_and_back(),
    # Its mark went with the first one's settle, so that the next comparison brought it in a second time.
    "lost to another, claimed back, and settled late": Schedule(
        steps=(
            Step(Start()),
            Step(Start()),
            *(Step(SetTrap("settle", effect="refuse")),) * 7,
            Step(Submit(Plan(failures=1, work="sleep", seconds=1.5)), seconds=1.2),
            Step(Stall(worker=0, seconds=1.3), seconds=1.6),
            Step(Crash(worker=1), seconds=1.1),
            Step(SetTrap("xread", effect="refuse", process=1), seconds=1.95),
            Step(Finish(), seconds=2.0),
        )
    ),
    # Whoever compared saw what a claim had brought, and not that it had been given away again.
    "claimed and given away while the worker compares what it holds": Schedule(
        steps=(
            Step(Bulk(Plan("retried", lane=0, work="sleep", seconds=0.2), count=2), seconds=0.1),
            Step(SetTrap("fetch", when="after", effect="crash")),
            Step(Start()),
            Step(Start(knows=1), seconds=0.1),
            Step(SetTrap("claim", when="after", effect="hold", seconds=1.3, skip=1)),
            Step(Start(), seconds=1.4),
            Step(SetTrap("xread", effect="refuse"), seconds=0.05),
            Step(Finish(), seconds=1.3),
        )
    ),
}


@pytest.mark.parametrize("name", list(FOUND))
def test_what_was_found_once_is_in_order(backend: Backend, name: str) -> None:
    assert not fails(backend, FOUND[name])


@pytest.mark.parametrize("seed", ["1:8775"])
def test_a_seed_that_failed_once_plays_to_its_end(backend: Backend, seed: str) -> None:
    assert not fails(backend, seeded(seed))
