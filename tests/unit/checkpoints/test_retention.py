"""Which checkpoints stay."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from taskmesh.checkpoints import manifest as manifests
from taskmesh.checkpoints.manifest import Loan, Manifest, Part
from taskmesh.checkpoints.retention import Every
from taskmesh.errors import CheckpointError, ConfigurationError
from taskmesh.keys import RunKeys


def version(number: int, **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "version": number,
        "parent": number - 1,
        "step": number,
        "batch": number,
        "token": 1,
        "kept": True,
        "layout": "",
        "parts": {"parameters": Part(True, number, 1, 0, 5, (b"x" * 16,))},
    }
    return Manifest(**{**fields, **changes})


def test_the_newest_stay() -> None:
    kept = [version(number) for number in (10, 20, 30, 40)]
    assert Every(steps=10, keep=2).retained(kept) == {30, 40}
    assert Every(steps=10, keep=9).retained(kept) == {10, 20, 30, 40}


def test_copies_that_rollbacks_made_do_not_take_the_place_of_others() -> None:
    """They share their chunks: were these damaged, nothing would be left."""
    ten, twenty, thirty = (version(number) for number in (10, 20, 30))
    copies = [version(number, parts=thirty.parts) for number in (31, 32)]
    assert Every(steps=10, keep=2).retained([ten, twenty, thirty, *copies]) == {20, 30, 31, 32}


def test_milestones_stay_by_their_step() -> None:
    kept = [
        version(0),
        version(7, step=100),
        version(8, step=150),
        version(9, step=200),
        version(10, step=250),
    ]
    assert Every(keep=1, milestone_steps=100).retained(kept) == {7, 9, 10}


def test_the_best_stays_and_of_equals_the_newer() -> None:
    losses = {1: 0.5, 2: 0.1, 3: 0.1, 4: 0.9, 5: 0.7}
    kept = [version(number, metrics={"loss": loss}) for number, loss in losses.items()]
    assert Every(keep=1, best="loss").retained(kept) == {3, 5}
    assert Every(keep=1, best="loss", best_is="highest").retained(kept) == {4, 5}
    assert Every(keep=1, best="accuracy").retained(kept) == {5}


def test_when_a_version_is_kept() -> None:
    rule = Every(steps=50, milestone_steps=30)
    assert [step for step in range(1, 121) if rule.is_due(step)] == [30, 50, 60, 90, 100, 120]


def test_when_a_version_is_kept_by_the_clock() -> None:
    def due(rule: Every) -> list[int]:
        """At one step a second."""
        steps, last = [], 0
        for step in range(1, 21):
            if rule.is_due(step, float(step - last)):
                steps.append(step)
                last = step
        return steps

    assert due(Every(seconds=6)) == [6, 12, 18]
    assert due(Every(seconds=6, steps=8)) == [6, 8, 14, 16]
    assert due(Every(seconds=6, milestone_steps=10)) == [6, 10, 16, 20]
    assert not Every(seconds=6).is_due(50)
    assert Every().is_due(50)
    assert not Every().is_due(49, 1e9)


@pytest.mark.parametrize(
    "changes", [{"steps": 0}, {"keep": 0}, {"milestone_steps": 0}, {"seconds": 0.0}, {"seconds": math.nan}]
)
def test_rules_that_cannot_be_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        Every(**changes)


def test_a_manifest_survives_the_wire_and_damage_is_found() -> None:
    original = version(3, metrics={"loss": 0.25}, restored_from=1, skipped=(4, 9))
    data = manifests.encode(original)
    assert manifests.decode(data) == original
    for loan in (Loan(0, 2, 1, 1, 0), Loan(-1, 1, 1, 1, 0), Loan(0, 0, 1, 1, 0)):
        part = replace(original.parts["parameters"], loans=(loan,))
        with pytest.raises(CheckpointError, match="loans"):
            manifests.decode(manifests.encode(replace(original, parts={"parameters": part})))
    for broken in (data[:-1], b"", b"\x01\x02", data + b"x"):
        with pytest.raises(CheckpointError):
            manifests.decode(broken)


def test_a_part_names_the_chunks_of_the_version_that_wrote_them() -> None:
    run = RunKeys("shop", "digits")
    part = Part(True, 7, 2, 3, 3, (b"a", b"b"))
    assert part.keys(run) == [run.chunk(7, 2, 3), run.chunk(7, 2, 4)]
    assert version(9, parts={"parameters": part}).keys(run) == part.keys(run)
