"""What is taken for divergence."""

from __future__ import annotations

import math

import pytest

from taskmesh.errors import ConfigurationError
from taskmesh.training import OnDivergence
from taskmesh.training.rollback import LossHistory

RULE = OnDivergence()


def history(*losses: float) -> LossHistory:
    seen = LossHistory()
    for loss in losses:
        seen = seen.add(loss, RULE.window)
    return seen


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_always_is(loss: float) -> None:
    assert RULE.judge(loss, LossHistory()) == f"the loss is {loss}"


def test_nothing_else_is_before_there_is_a_window() -> None:
    assert RULE.judge(1e9, history(*[1.0] * (RULE.window - 1))) is None
    assert RULE.judge(1e9, history(*[1.0] * RULE.window)) is not None


def test_a_falling_and_a_noisy_loss_are_not() -> None:
    seen = LossHistory()
    for step in range(500):
        loss = 2.3 * 0.98**step * (1 + 0.4 * math.sin(step * 7.0))
        assert RULE.judge(loss, seen) is None
        seen = seen.add(loss, RULE.window)


def test_a_jump_above_the_first_losses_is() -> None:
    seen = history(*[2.3] * 5, *[0.5] * 40)
    assert RULE.judge(1.9, seen) is None, "4 times the median is 2"
    reason = RULE.judge(2.5, seen)
    assert reason is not None
    assert "jumped from about 0.5 to 2.5" in reason


def test_a_hard_batch_among_small_losses_is_not() -> None:
    assert RULE.judge(1.0, history(*[2.3] * 5, *[1e-4] * 40)) is None


def test_the_history_keeps_the_first_and_the_last() -> None:
    seen = history(*map(float, range(100)))
    assert seen.first == (0.0, 1.0, 2.0, 3.0, 4.0)
    assert seen.recent == tuple(map(float, range(80, 100)))


@pytest.mark.parametrize("changes", [{"window": 1}, {"factor": 1.0}, {"recomputes": -1}])
def test_settings_that_cannot_work_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError):
        OnDivergence(**changes)  # type: ignore[arg-type]
