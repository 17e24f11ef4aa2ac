"""Deep gradient compression: momentum where the gradient is made, masked where it was sent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from taskmesh.errors import ConfigurationError
from taskmesh.training import DGC
from taskmesh.training.buckets import Bucket
from tests.unit.training.compressions import Link, final_loss, normal

HALVES = 2.0**-11


def test_it_does_what_the_paper_says() -> None:
    """Written down plainly, a step at a time, for values that fp16 holds exactly."""
    size, kept, momentum = 40, 4, np.float32(0.5)
    link = Link(DGC(density=0.1, momentum=0.5), Bucket(0, size))
    velocity, waiting = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for step in range(12):
        gradient = np.random.default_rng(step).integers(-32, 33, size).astype(np.float32)
        velocity = momentum * velocity + gradient
        waiting = waiting + velocity
        largest = sorted(range(size), key=lambda at: (-abs(waiting[at]), at))[:kept]
        found = link.send(gradient)
        assert set(np.flatnonzero(found)) == set(largest)
        assert np.abs(found[largest] - waiting[largest]).max() <= np.abs(waiting).max() * HALVES
        waiting[largest] -= found[largest]
        velocity[largest] = 0
        assert (link.memory["velocity"] == velocity).all()
        assert (link.memory["accumulation"] == waiting).all()
        assert link.memory["steps"] == [step + 1]


def test_all_that_momentum_makes_of_the_gradients_arrives() -> None:
    """A value that was never sent has gathered what the momentum of an optimizer would have made of it."""
    link = Link(DGC(density=0.001, momentum=0.9), Bucket(0, 1000))
    gradient = np.full(1000, 0.5, np.float32)
    gradient[7] = 1e4
    for _ in range(10):
        assert np.flatnonzero(link.send(gradient)).tolist() == [7]
    gathered = sum(0.9**age for step in range(10) for age in range(step + 1))
    assert np.allclose(link.memory["accumulation"][:7], 0.5 * gathered, rtol=1e-5)


def test_the_density_falls_by_fours() -> None:
    compression = DGC(density=0.001, warm_up=8)
    stages = [0.25, 0.0625, 0.015625, 0.00390625]
    assert [compression.density_at(step) for step in range(8)] == [each for each in stages for _ in range(2)]
    assert compression.density_at(8) == compression.density_at(10**9) == 0.001
    link = Link(compression, Bucket(0, 10_000))
    counts = [np.count_nonzero(link.send(normal(10_000, step))) for step in range(10)]
    assert counts == [2500, 2500, 625, 625, 157, 157, 40, 40, 10, 10]


@pytest.mark.parametrize("density", [0.25, 0.3, 1.0])
def test_a_high_density_has_nothing_to_warm_up_to(density: float) -> None:
    assert {DGC(density, warm_up=5).density_at(step) for step in range(7)} == {density}


@pytest.mark.parametrize("warm_up", [1, 2, 3, 5, 100])
def test_the_density_never_rises(warm_up: int) -> None:
    compression = DGC(density=0.003, warm_up=warm_up)
    falling = [compression.density_at(step) for step in range(warm_up + 2)]
    assert all(a >= b for a, b in itertools.pairwise(falling))
    assert falling[0] == 0.25
    assert falling[warm_up:] == [0.003] * 2
    assert all(each > 0.003 for each in falling[:warm_up])


def test_a_gradient_that_is_too_long_is_cut_to_the_clip() -> None:
    direction = normal(5000)
    for factor, length in ((1.0, 10.0), (1e30, 10.0), (1e-3, float(np.linalg.norm(direction)) * 1e-3)):
        link = Link(DGC(density=1.0, clip=10.0), Bucket(0, 5000))
        found = link.send(direction * np.float32(factor)).astype(np.float64)
        assert abs(np.linalg.norm(found) / length - 1) < 1e-3
        assert np.abs(found / np.linalg.norm(found) - direction / np.linalg.norm(direction)).max() < 1e-4


def test_training_converges_as_with_momentum_at_the_master() -> None:
    """A tenth of the rate is enough: 1 / (1 - 0.9) is what momentum makes of it."""
    dense = final_loss(None, rate=2.0)
    assert final_loss(DGC(density=0.01, momentum=0.9, warm_up=20), rate=0.2) < 2 * dense
    assert final_loss(DGC(density=0.01, momentum=0.0, warm_up=20), rate=0.2) > 5 * dense


@pytest.mark.parametrize(
    "settings",
    [
        {"density": 0.0},
        {"density": 1.5},
        {"momentum": 1.0},
        {"momentum": -0.1},
        {"momentum": float("nan")},
        {"clip": 0.0},
        {"clip": float("inf")},
        {"clip": float("nan")},
        {"warm_up": -1},
        {"warm_up": 2**25},
    ],
)
def test_settings_that_cannot_be_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="DGC"):
        DGC(**settings)  # type: ignore[arg-type]


def test_the_name_tells_all_settings_apart() -> None:
    values = [DGC(), DGC(0.01), DGC(momentum=0.5), DGC(clip=1.0), DGC(warm_up=3)]
    assert len({each.name for each in values}) == len(values)
