"""What is taken for a drop of a metric, and which metrics a run can go by."""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import nn

from taskmesh import Mesh
from taskmesh.errors import ConfigurationError
from taskmesh.training import Every, OnDivergence, Validate
from taskmesh.training.validation import MetricHistory
from tests.integration.training_support import make_trainer

RULE = OnDivergence(metric_drop=0.2)


def nothing(model: nn.Module) -> float:
    return 0.0


HIGH = Validate(nothing, name="accuracy", best_is="highest")
LOW = Validate(nothing, name="perplexity")


def history(*values: float) -> MetricHistory:
    seen = MetricHistory()
    for step, value in enumerate(values, 1):
        seen = seen.add(value, step, step)
    return seen


@pytest.mark.parametrize(
    ("validate", "values", "value", "drops"),
    [
        (HIGH, (0.9, 0.9, 0.9), 0.73, False),
        (HIGH, (0.9, 0.9, 0.9), 0.71, True),
        (HIGH, (0.9, 0.9, 0.9), 2.0, False),
        (LOW, (10.0, 10.0, 10.0), 11.9, False),
        (LOW, (10.0, 10.0, 10.0), 12.1, True),
        (LOW, (-10.0, -10.0, -10.0), -7.9, True),
        (HIGH, (0.9, 0.9, 0.9), math.nan, True),
        (HIGH, (0.9, 0.9), 0.1, False),  # too few to go by
        (HIGH, (0.5, 0.5, 1.0, 0.5, 0.5), 0.45, False),  # one lucky value says little
        (HIGH, (0.1, 0.1, 0.1, 0.9, 0.9, 0.9, 0.9, 0.9), 0.2, True),  # only the last five count
    ],
)
def test_a_drop(validate: Validate, values: tuple[float, ...], value: float, drops: bool) -> None:
    assert (RULE.judge_metric(validate, value, history(*values)) is not None) is drops


def test_nothing_is_a_drop_unless_one_asks() -> None:
    assert OnDivergence().judge_metric(HIGH, math.nan, history(0.9, 0.9, 0.9)) is None


def test_the_reason_is_in_words() -> None:
    assert RULE.judge_metric(HIGH, 0.5, history(0.9, 0.9, 0.9)) == "accuracy went from about 0.9 to 0.5"


@pytest.mark.parametrize(
    ("choices", "reason"),
    [
        ({"rollback": RULE}, "a metric_drop needs a metric"),
        ({"checkpoint": Every(best="accuracy")}, r"measures loss \(best is the lowest\)"),
        ({"checkpoint": Every(best="accuracy"), "validate": HIGH}, r"accuracy \(best is the highest\)"),
    ],
)
def test_metrics_that_are_never_measured_are_refused(choices: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        make_trainer(Mesh("metrics"), **choices)


@pytest.mark.parametrize("changes", [{"every": 0}, {"name": ""}, {"name": "loss"}, {"best_is": "best"}])
def test_what_makes_no_sense_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Validate(nothing, **changes)
