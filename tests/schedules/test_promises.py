"""Whatever the schedule, the promises hold; a schedule plays the same way every time."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings

from tests.schedules import steps as s
from tests.schedules.explore import as_python, fails, smaller, story
from tests.schedules.generate import schedules, seeded
from tests.schedules.node import Backend
from tests.schedules.play import Broken, Player, play

PARTS = 6
SCHEDULES_IN_A_PART = 300


@pytest.mark.parametrize("part", range(PARTS))
def test_of_many_schedules_none_breaks_a_promise(backend: Backend, part: int) -> None:
    """Schedules of a random seed. ``python -m tests.schedules.explore --replay SEED:NUMBER`` plays one again."""
    seed = random.randrange(1 << 32)
    print("seed", seed)
    for number in range(SCHEDULES_IN_A_PART):
        schedule = seeded(f"{seed}:{number}")
        if why := fails(backend, schedule):
            small = smaller(backend, schedule, tries=100)
            pytest.fail(f"{seed}:{number}: {why}\n{as_python(small)}\n{story(backend, small)}")


@settings(
    max_examples=300,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(schedules())
def test_no_schedule_that_hypothesis_makes_breaks_a_promise(backend: Backend, schedule: s.Schedule) -> None:
    play(backend, schedule)


def _trace(backend: Backend, schedule: s.Schedule) -> list[tuple[float, str, str]]:
    player = Player(backend, schedule)
    try:
        player.play()
    except Broken:
        pass
    return player.world.trace


def test_a_schedule_plays_the_same_way_every_time(backend: Backend) -> None:
    for number in range(15):
        schedule = seeded(f"the same:{number}")
        assert _trace(backend, schedule) == _trace(backend, schedule), f"seed {number}"
