"""Gradients that are too long, made shorter (Pascanu et al., "On the difficulty of training recurrent neural networks",
2013)."""

from __future__ import annotations

import math

import numpy as np

from taskmesh.training.buckets import BUCKET_VALUES
from taskmesh.training.step.aggregate import Values


def norm_of(gradient: Values) -> float:
    """The Euclidean norm, in float64; the order of its additions depends on the gradient's length alone."""
    blocks = range(0, len(gradient), BUCKET_VALUES)
    squares = (np.square(gradient[at : at + BUCKET_VALUES], dtype=np.float64) for at in blocks)
    return math.sqrt(math.fsum(float(block.sum()) for block in squares))


def clip_norm(gradient: Values, longest: float) -> float:
    """Scale a gradient down, in its place, to a norm of at most ``longest``. Returns the norm that it had."""
    norm = norm_of(gradient)
    if norm > longest and math.isfinite(norm):
        np.multiply(gradient, np.float32(longest / norm), out=gradient)
    return norm
