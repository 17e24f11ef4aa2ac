"""Clipped steps: what the event says of them, and that they come out the same everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from taskmesh import Mesh, TrainingError
from taskmesh.events import Committed
from taskmesh.training import Every, Int8, LocalSteps
from tests.integration.training_support import ONE, make_trainer

MakeMesh = Callable[..., Mesh]
STEPS = 8


async def train(mesh: Mesh, steps: int = STEPS, **changes: Any) -> tuple[str, list[Committed]]:
    """The digest that a run comes to, whose steps must come out the same again, and its events."""
    seen: list[Committed] = []
    trainer = make_trainer(mesh, checkpoint=Every(steps=4, keep=9), **changes)
    async with mesh.worker(ONE), mesh.worker(ONE):
        finished = await trainer.run(steps=steps, on_commit=seen.append)
        replayed = await trainer.replay()
    assert len(replayed) == steps
    assert all(version.matches for version in replayed)
    return finished.digest, seen


async def test_what_a_step_was_made_of_is_in_its_event(make_mesh: MakeMesh) -> None:
    plain, events = await train(make_mesh("plain"))
    measured, seen = await train(make_mesh("measured"), clip=math.inf)
    assert measured == plain, "to measure changes nothing"
    assert all(event.gradient_norm is None for event in events)
    assert all(event.gradient_norm and event.gradient_norm > 0.1 for event in seen)
    assert [event.samples for event in seen] == [128] * STEPS
    rates = [event.lr or 0.0 for event in seen]
    assert rates[0] == 0.01
    assert rates == sorted(rates, reverse=True), "a cosine"


@pytest.mark.parametrize("changes", [{}, {"downlink": Int8()}, {"mode": LocalSteps(10)}])
async def test_clipped_steps_are_replayed_to_the_same_bits(
    make_mesh: MakeMesh, changes: dict[str, Any]
) -> None:
    steps = 3 if "mode" in changes else STEPS
    plain, _ = await train(make_mesh("plain"), steps, **changes)
    clipped, seen = await train(make_mesh("clipped"), steps, clip=0.1, **changes)
    assert clipped != plain
    norms = [event.gradient_norm for event in seen]
    assert all(norms) if "mode" not in changes else norms == [None] * steps


async def test_a_run_goes_on_with_the_clip_that_it_was_begun_with(make_mesh: MakeMesh) -> None:
    await train(make_mesh(), clip=0.1)
    with pytest.raises(TrainingError, match=r"was begun with clip 0\.1, not none"):
        await train(make_mesh())
