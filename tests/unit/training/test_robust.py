"""Aggregations that withstand a few wrong shards."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from taskmesh.errors import ConfigurationError
from taskmesh.training import Median, TrimmedMean
from taskmesh.training.buckets import Bucket
from taskmesh.training.robust import Robust
from taskmesh.training.step.aggregate import Contribution, Pool, Round

BUCKETS = (Bucket(2, 5), Bucket(0, 2))


def round_of(
    rows: list[list[float]], counts: list[int], robust: Robust, order: tuple[int, ...]
) -> list[float]:
    """One gradient of rows of mean gradients."""
    pool = Pool(5, 2)
    round_ = Round(len(rows), BUCKETS, pool, robust)
    for shard in order:
        round_.open(shard, Contribution(1.0, counts[shard]))
        for bucket, place in enumerate(BUCKETS):
            values = np.array(rows[shard], "f4")[place.start : place.stop] * np.float32(counts[shard])
            round_.memory(shard, bucket)[:] = values
            round_.add(shard, bucket)
    found: list[float] = round_.update().gradient.tolist()
    round_.release()
    return found


ROWS = [
    [1.0, 5.0, 0.0, 2.0, 1e30],
    [2.0, 4.0, 0.0, 2.0, -1.0],
    [3.0, 3.0, 9.0, 2.0, 1.0],
    [4.0, -1e30, 0.0, 2.0, 2.0],
]


@pytest.mark.parametrize(
    ("robust", "wanted"),
    [
        (Median(), [2.5, 3.5, 0.0, 2.0, 1.5]),
        (TrimmedMean(0.25), [2.5, 3.5, 0.0, 2.0, 1.5]),
        (TrimmedMean(0.01), [2.5, 3.5, 0.0, 2.0, 1.5]),
    ],
)
def test_each_coordinate_for_itself_whatever_the_order_and_the_counts(
    robust: Robust, wanted: list[float]
) -> None:
    for order in itertools.permutations(range(4)):
        assert round_of(ROWS, [1, 2, 4, 8], robust, order) == wanted


def test_an_odd_median_is_the_one_in_the_middle() -> None:
    assert round_of(ROWS[:3], [1, 1, 1], Median(), (2, 0, 1)) == [2.0, 4.0, 0.0, 2.0, 1.0]


def test_a_trimmed_mean_is_near_the_mean_and_wild_shards_do_not_move_it() -> None:
    generator = np.random.default_rng(1)
    rows = [list(map(float, generator.normal(3, 1, 5))) for _ in range(20)]
    clean = round_of(rows, [1] * 20, TrimmedMean(0.1), tuple(range(20)))
    wild = [[1e6] * 5, [-1e6] * 5, *rows[2:]]
    moved = round_of(wild, [1] * 20, TrimmedMean(0.1), tuple(range(20)))
    assert np.abs(np.array(clean) - np.mean(rows, axis=0)).max() < 0.3
    assert np.abs(np.array(moved) - np.array(clean)).max() < 0.5


def test_shards_that_are_left_out_have_no_say() -> None:
    for order in itertools.permutations(range(4)):
        pool = Pool(5, 2)
        round_ = Round(4, BUCKETS, pool, Median())
        for shard in order:
            if shard == 0:
                round_.leave_out(0)
                continue
            round_.open(shard, Contribution(1.0, 2))
            for bucket, place in enumerate(BUCKETS):
                round_.memory(shard, bucket)[:] = 2 * np.array(ROWS[shard], "f4")[place.start : place.stop]
                round_.add(shard, bucket)
        assert round_.update().gradient.tolist() == [3.0, 3.0, 0.0, 2.0, 1.0]


def test_a_shard_without_samples_has_no_say() -> None:
    assert round_of(ROWS, [1, 0, 1, 1], Median(), (0, 1, 2, 3)) == [3.0, 3.0, 0.0, 2.0, 2.0]


def test_a_short_batch_leaves_a_median_at_least() -> None:
    assert round_of(ROWS[:2], [1, 1], TrimmedMean(0.4), (0, 1)) == pytest.approx([1.5, 4.5, 0.0, 2.0, 5e29])


@pytest.mark.parametrize(
    ("robust", "shards"), [(Median(), 2), (TrimmedMean(0.4), 4), (TrimmedMean(0.49), 50)]
)
def test_too_few_shards_are_refused(robust: Robust, shards: int) -> None:
    with pytest.raises(ConfigurationError):
        robust.check(shards)
    robust.check(101)


def test_a_share_that_leaves_nothing_is_refused() -> None:
    for share in (0.0, 0.5):
        with pytest.raises(ConfigurationError):
            TrimmedMean(share)
