"""The pure decisions: when to try again, who is dead, how much to fetch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh.broker.liveness import Witness
from taskmesh.broker.streams import lane_quotas
from taskmesh.errors import ConfigurationError, InvalidArguments
from taskmesh.keys import RETURNED, SUSPECTS, check_name
from taskmesh.tasks import Context, Retry
from taskmesh.worker.outcome import failure_of, judge
from taskmesh.worker.pace import Pace

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


# Witness


def test_a_worker_is_dead_when_its_last_seen_stood_for_a_ttl() -> None:
    witness = Witness(ttl=1.0)
    rows = [(b"a", b"100"), (b"b", b"100")]
    assert witness.observe(rows, 0.0, 1) == []
    assert witness.observe([(b"a", b"101"), (b"b", b"100")], 0.9, 1) == []
    [dead] = witness.observe([(b"a", b"101"), (b"b", b"100")], 1.0, 1)
    assert (dead.worker, dead.last_seen) == (b"b", b"100")


def test_a_lost_connection_starts_the_time_again() -> None:
    witness = Witness(ttl=1.0)
    rows = [(b"a", b"100")]
    witness.observe(rows, 0.0, 1)
    assert witness.observe(rows, 5.0, 2) == []
    assert witness.observe(rows, 5.9, 2) == []
    assert len(witness.observe(rows, 6.0, 2)) == 1


def test_a_worker_that_left_and_came_again_starts_anew() -> None:
    witness = Witness(ttl=1.0)
    witness.observe([(b"a", b"100")], 0.0, 1)
    witness.observe([], 0.5, 1)
    assert witness.observe([(b"a", b"100")], 1.5, 1) == []


def test_what_was_handed_back_is_to_be_had_at_once() -> None:
    dead = Witness(ttl=10).observe([(RETURNED, b"0"), (SUSPECTS, b"0"), (b"a", b"0")], 0.0, 1)
    assert [each.worker for each in dead] == [RETURNED, SUSPECTS]


# Pace


def test_the_pace_is_measured_work_within_the_horizon() -> None:
    pace = Pace(horizon=0.05, most=100)
    assert pace.ahead == 0
    for step in range(1, 200):
        pace.ended(10, step * 0.01)  # 1,000 a second
    assert 45 <= pace.ahead <= 50
    for step in range(1, 200):
        pace.ended(1000, 2 + step * 0.01)
    assert pace.ahead == 100


def test_slowing_down_counts_at_once() -> None:
    pace = Pace(horizon=1.0, most=10_000)
    for step in range(1, 100):
        pace.ended(10, step * 0.01)
    pace.ended(1, 1.19)
    assert pace.ahead <= 10


def test_a_stall_forgets_what_was_measured_before() -> None:
    pace = Pace(horizon=1.0, most=10_000)
    for step in range(1, 100):
        pace.ended(10, step * 0.01)
    pace.stalled()
    assert pace.ahead == 0


# names


@pytest.mark.parametrize("name", ["a", "A.b-c_9", "x" * 100])
def test_names_that_may_stand_in_a_key(name: str) -> None:
    assert check_name("queue", name) == name


@pytest.mark.parametrize("name", ["", "a b", "a:b", "{a}", "ü", "x" * 101, "a\n"])
def test_names_that_may_not(name: str) -> None:
    with pytest.raises(ConfigurationError, match="queue name"):
        check_name("queue", name)
