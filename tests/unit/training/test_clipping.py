"""Gradients that are too long."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from taskmesh import ConfigurationError, Mesh
from taskmesh.training.step.clipping import clip_norm, norm_of
from tests.integration.training_support import make_trainer


def gradient(size: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(size, np.float32)


@pytest.mark.parametrize("size", [0, 1, 1000, 600_000])
def test_the_norm_is_the_euclidean_one(size: int) -> None:
    values = gradient(size)
    assert norm_of(values) == pytest.approx(float(np.linalg.norm(values.astype(np.float64))), rel=1e-12)


def test_values_whose_squares_would_overflow_have_a_norm() -> None:
    assert norm_of(np.full(4, 3e38, np.float32)) == pytest.approx(6e38)


def test_a_long_one_is_scaled_as_torch_does() -> None:
    values = gradient(300_000)
    parameter = nn.Parameter(torch.zeros(len(values)))
    parameter.grad = torch.from_numpy(values.copy())
    nn.utils.clip_grad_norm_([parameter], 2.5)
    assert clip_norm(values, 2.5) > 100
    assert norm_of(values) == pytest.approx(2.5, rel=1e-6)
    np.testing.assert_allclose(values, parameter.grad.numpy(), rtol=1e-5)


@pytest.mark.parametrize("longest", [100.0, math.inf])
def test_a_short_one_stays_as_it_is(longest: float) -> None:
    values = gradient(1000)
    assert clip_norm(values, longest) == norm_of(gradient(1000))
    np.testing.assert_array_equal(values, gradient(1000))


def test_one_that_is_not_finite_is_left_to_the_caller() -> None:
    values = np.array([1.0, np.inf], np.float32)
    assert clip_norm(values, 1.0) == math.inf
    assert values[0] == 1.0


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_what_makes_no_sense_is_refused(clip: float) -> None:
    with pytest.raises(ConfigurationError, match="clip is"):
        make_trainer(Mesh("clip"), clip=clip)
