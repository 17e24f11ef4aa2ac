"""A gradient in pieces."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from taskmesh.tensors import FlatLayout
from taskmesh.training.buckets import BUCKET_VALUES, Bucket, cut


def model(*sizes: int) -> nn.Module:
    holder = nn.Module()
    for place, size in enumerate(sizes):
        holder.register_parameter(f"p{place}", nn.Parameter(torch.zeros(size)))
    return holder


def test_a_small_model_is_one_bucket() -> None:
    layout = FlatLayout.of(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)))
    assert cut(layout) == (Bucket(0, 23, ((3, 4), (3,), (2, 3), (2,))),)


def test_buckets_cover_everything_once_last_parameters_first() -> None:
    layout = FlatLayout.of(model(10, 3 * BUCKET_VALUES + 1, 0, BUCKET_VALUES, 7, BUCKET_VALUES - 7, 5))
    for whole in (False, True):
        buckets = cut(layout, whole=whole)
        covered = sorted((bucket.start, bucket.stop) for bucket in buckets)
        assert covered[0][0] == 0
        assert covered[-1][1] == layout.parameter_count
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))
        assert all(bucket.size for bucket in buckets)
        assert buckets[0].stop == layout.parameter_count
    assert max(bucket.size for bucket in cut(layout)) <= BUCKET_VALUES
    assert max(bucket.size for bucket in cut(layout, whole=True)) == 3 * BUCKET_VALUES + 1
    assert all(bucket.shapes for bucket in cut(layout, whole=True))
