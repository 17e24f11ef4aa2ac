"""The demo's verdict."""

from __future__ import annotations

import dataclasses

import pytest

from taskmesh.demo.report import Report

HELD = Report(accuracy=0.98, worker_killed_recovery_s=1.0, rollbacks=1, shards_refused=1)


def test_it_held() -> None:
    assert HELD.held


@pytest.mark.parametrize(
    ("figure", "value"),
    [
        ("accuracy", 0.9),
        ("tasks_lost", 1),
        ("tasks_settled_twice", 1),
        ("keys_leaked", 1),
        ("worker_killed_recovery_s", 0.0),
        ("rollbacks", 0),
        ("shards_refused", 0),
    ],
)
def test_what_did_not_hold_or_did_not_happen_is_said(figure: str, value: float) -> None:
    assert not dataclasses.replace(HELD, **{figure: value}).held
