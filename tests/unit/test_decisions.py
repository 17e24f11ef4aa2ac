"""The pure decisions: when to try again, who is dead, how much to fetch."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh.broker.caller import FIRST_PAUSE, LONGEST_PAUSE, pause_before
from taskmesh.broker.liveness import NO_ANSWER, STRUCK_OFF, Beat, Steadiness, pause_between_looks
from taskmesh.broker.streams import lane_quotas
from taskmesh.errors import ConfigurationError, InvalidArguments
from taskmesh.keys import check_name
from taskmesh.settings import WorkerSettings
from taskmesh.tasks import Context, Retry
from taskmesh.worker.deliveries import Source
from taskmesh.worker.outcome import failure_of, judge
from taskmesh.worker.pace import Pace
from taskmesh.worker.room import Room

# Retry


def test_pauses_grow_by_the_factor_up_to_the_longest() -> None:
    retry = Retry(attempts=10, delay=1, factor=2, max_delay=5, jitter=0)
    assert [retry.pause_after(n, 0.5) for n in range(1, 6)] == [1, 2, 4, 5, 5]


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_jitter_takes_away_its_share_at_most(attempt: int, draw: float) -> None:
    retry = Retry(delay=2, factor=3, max_delay=60, jitter=0.25)
    whole = Retry(delay=2, factor=3, max_delay=60, jitter=0).pause_after(attempt, 0)
    assert 0.75 * whole <= retry.pause_after(attempt, draw) <= whole


@pytest.mark.parametrize("wrong", [{"attempts": 0}, {"delay": -1}, {"factor": 0.5}, {"jitter": 1.5}])
def test_a_retry_that_cannot_work_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        Retry(**wrong)  # type: ignore[arg-type]


# judge


def test_a_failure_is_tried_again_until_its_tries_are_spent() -> None:
    retry = Retry(attempts=3, delay=1, jitter=0)
    assert judge(ValueError(), 1, retry, 0).delay == 1
    assert judge(ValueError(), 2, retry, 0).delay == 2
    last = judge(ValueError(), 3, retry, 0)
    assert last.delay is None
    assert "3 of 3" in last.reason


def test_only_what_is_worth_it() -> None:
    retry = Retry(attempts=3, on=(OSError,))
    assert judge(ConnectionError(), 1, retry, 0).delay is not None
    assert judge(ValueError(), 1, retry, 0).delay is None
    assert judge(InvalidArguments(), 1, Retry(attempts=3), 0).delay is None


def test_a_handler_that_asks_gets_another_try_while_there_is_one() -> None:
    context = Context("id", "t", "q", 1, 1, "w")
    retry = Retry(attempts=2, delay=7, jitter=0, on=())
    for delay, expected in ((0.5, 0.5), (None, 7), (-1.0, 0)):
        with pytest.raises(Exception, match="another try") as asked:
            context.retry(delay)
        assert judge(asked.value, 1, retry, 0).delay == expected
        assert judge(asked.value, 2, retry, 0).delay is None


def test_an_exception_travels_with_what_of_it_can() -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    try:
        raise Odd(object())
    except Odd as error:
        failure = failure_of(error, ())
    assert failure.type.endswith("Odd")
    assert failure.args == ()
    assert "raise Odd(object())" in failure.traceback
    assert failure_of(ValueError("x", 1), ()).args == ("x", 1)
    assert len(failure_of(ValueError("y" * 100_000), ()).traceback) < 20_000


# lane_quotas


@given(st.integers(0, 3000), st.integers(0, 10**6))
def test_quotas_share_out_the_total(total: int, turn: int) -> None:
    quotas = lane_quotas(total, turn)
    assert sum(quotas) == total
    assert all(quota >= 0 for quota in quotas)


@given(st.integers(0, 1000))
def test_over_sixteen_turns_the_lanes_have_twelve_three_and_one(turn: int) -> None:
    assert lane_quotas(16, turn) == (12, 3, 1)
    singles = [lane_quotas(1, turn + step) for step in range(16)]
    assert tuple(map(sum, zip(*singles, strict=True))) == (12, 3, 1)


# Steadiness


def beats(steadiness: Steadiness, *answers: tuple[float, int | None], generation: int = 1) -> None:
    """Beats asked for at those seconds; the server's ms, or None where it gave no answer."""
    for seconds, server_ms in answers:
        steadiness.hear(
            Beat(b"w", seconds, seconds, NO_ANSWER if server_ms is None else server_ms, generation)
        )


def is_steady(steadiness: Steadiness, now: float, ahead: float = 0.0) -> bool:
    """With a server whose clock began at 5 s, and is ahead of that by so many seconds."""
    return steadiness.is_steady(now, int(1000 * (5 + now + ahead)))


def test_an_observer_is_to_be_trusted_after_a_ttl_of_answers() -> None:
    steadiness = Steadiness(ttl=1.0)
    assert not is_steady(steadiness, 0.0)
    beats(steadiness, *((step / 4, 5000 + 250 * step) for step in range(4)))
    assert not is_steady(steadiness, 0.9)
    beats(steadiness, (1.0, 6000))
    assert is_steady(steadiness, 1.0)
    assert not is_steady(steadiness, 1.6)  # no answer for longer than the heartbeat leaves
    assert not is_steady(steadiness, 1.1, ahead=0.5)  # the server's clock has jumped since


@pytest.mark.parametrize(
    ("what", "answers"),
    [
        ("no answer", [(1.0, None), (1.1, 6100)]),
        ("a gap", [(1.8, 6800)]),
        ("a clock that jumps on", [(1.1, 9000)]),
        ("a clock that jumps back", [(1.1, 4000)]),
    ],
)
def test_a_break_starts_the_time_again(what: str, answers: list[tuple[float, int | None]]) -> None:
    steadiness = Steadiness(ttl=1.0)
    beats(steadiness, *((step / 4, 5000 + 250 * step) for step in range(5)))
    beats(steadiness, *answers)
    end, server_ms = answers[-1]
    assert server_ms is not None
    ahead = server_ms / 1000 - 5 - end
    assert not is_steady(steadiness, end, ahead)
    beats(steadiness, *((end + step / 4, server_ms + 250 * step) for step in range(1, 5)))
    assert is_steady(steadiness, end + 1.01, ahead)


def test_a_new_connection_starts_the_time_again() -> None:
    steadiness = Steadiness(ttl=1.0)
    beats(steadiness, *((step / 4, 5000 + 250 * step) for step in range(5)))
    beats(steadiness, (1.25, 6250), generation=2)
    assert not is_steady(steadiness, 1.3)


def test_a_server_that_has_struck_the_worker_off_is_there_all_the_same() -> None:
    steadiness = Steadiness(ttl=1.0)
    beats(steadiness, *((step / 4, 5000 + 250 * step) for step in range(5)))
    beats(steadiness, (1.25, STRUCK_OFF))
    assert not is_steady(steadiness, 1.3)
    beats(steadiness, (1.5, 6500))
    assert is_steady(steadiness, 1.5)


def test_many_observers_look_in_turn() -> None:
    assert pause_between_looks(10, 1) == pause_between_looks(10, 16) == 0.1
    assert pause_between_looks(1, 16) == pytest.approx(0.1)
    assert pause_between_looks(0.5, 2) == pytest.approx(0.05)
    assert pause_between_looks(10, 160) == pytest.approx(1.0)
    assert pause_between_looks(10, 5000) == pytest.approx(2.0)


# Pace


def test_the_pace_is_measured_work_within_the_horizon() -> None:
    pace = Pace(horizon=0.05)
    assert pace.ahead == 0
    for step in range(1, 200):
        pace.ended(10, step * 0.01)  # 1,000 a second
    assert 45 <= pace.ahead <= 50
    for step in range(1, 200):
        pace.ended(1000, 2 + step * 0.01)  # 100,000 a second
    assert 4500 <= pace.ahead <= 5000


def test_slowing_down_counts_at_once() -> None:
    pace = Pace(horizon=1.0)
    for step in range(1, 100):
        pace.ended(10, step * 0.01)
    pace.ended(1, 1.19)
    assert pace.ahead <= 10


def test_slots_that_end_together_say_nothing_about_the_pace() -> None:
    pace = Pace(horizon=0.05, slots=10)
    for burst in range(1, 50):
        for place in range(10):  # ten handlers of 0.2 s each, side by side: fifty a second
            pace.ended(1, burst * 0.2 + place * 0.001)
    assert 1 <= pace.ahead <= 5
    for step in range(1, 400):
        pace.ended(10, 11 + step * 0.001)  # and then ten thousand a second
    assert pace.ahead >= 400


def test_a_stall_forgets_what_was_measured_before() -> None:
    pace = Pace(horizon=1.0)
    for step in range(1, 100):
        pace.ended(10, step * 0.01)
    pace.stalled()
    assert pace.ahead == 0


# Room


def test_what_lies_ready_grows_with_the_wire_up_to_a_second_fetch() -> None:
    pace = Pace(horizon=1.0)
    for step in range(1, 200):
        pace.ended(1000, step * 0.01)
    executor = SimpleNamespace(free=-100)  # as many wait as run

    def room_at(round_trip: float) -> int:
        source = Source(cast(Any, SimpleNamespace(keys=SimpleNamespace(queue="work"))), 10.0)
        source.round_trip = round_trip
        settings = WorkerSettings(max_fetch=1000)
        return Room([source], cast(Any, []), cast(Any, executor), pace, settings).of(source)

    assert room_at(0.0) == 900
    executor.free = -1000
    assert room_at(0.0) == 0
    assert room_at(0.001) == 500
    assert room_at(0.002) == room_at(1.0) == room_at(math.inf) == 1000


# trying again


def test_pauses_between_tries_grow_up_to_a_limit_and_differ() -> None:
    for attempt in range(60):
        pauses = {pause_before(attempt) for _ in range(20)}
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0**attempt)
        assert longest / 2 <= min(pauses) < max(pauses) <= longest


# names


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x" * 100])
def test_names_that_may_stand_in_a_key(name: str) -> None:
    assert check_name("queue", name) == name


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "ü", "x" * 101, "a\n"])
def test_names_that_may_not(name: str) -> None:
    with pytest.raises(ConfigurationError, match="queue name"):
        check_name("queue", name)
