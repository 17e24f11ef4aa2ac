"""Which ranges of a gradient workers reduce, and when that pays."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh.errors import ConfigurationError
from taskmesh.training.buckets import Bucket
from taskmesh.training.orders import ShardResult
from taskmesh.training.ranges import Pieces, cut_ranges, pays, pieces_of
from tests.conftest import MakeMesh
from tests.integration.training_support import make_trainer


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 12))
def test_ranges_are_all_of_the_buckets_in_order(sizes: list[int], count: int) -> None:
    ranges = cut_ranges([Bucket(0, size) for size in sizes], count)
    assert [place for places in ranges for place in places] == list(range(len(sizes)))
    assert all(ranges)
    assert len(ranges) <= count
    if len(set(sizes)) == 1:
        assert len(ranges) == min(count, len(sizes)) or len(sizes) % count


def test_a_bucket_that_is_larger_than_all_the_others_leaves_them_together() -> None:
    sizes = [100, 1, 1, 1, 1]
    assert cut_ranges([Bucket(0, size) for size in sizes], 2) == [range(1), range(1, 5)]


def test_a_large_gradient_is_cut_into_more_ranges_than_there_are_workers() -> None:
    ranges = cut_ranges([Bucket(0, 2**18)] * 200, 2)
    assert [len(places) for places in ranges] == [50, 50, 50, 50]


def test_pieces_are_those_of_the_range() -> None:
    result = ShardResult(
        "computed", "w", count=7, sizes=(1, 2, 3, 4), attempt="a", digests=(b"1", b"2", b"3", b"4")
    )
    assert pieces_of(5, result, range(1, 3)) == Pieces(5, "a", 7, (2, 3), (b"2", b"3"))


GRADIENT = 40_000_000


@pytest.mark.parametrize(
    ("shards", "saved", "nodes", "hosts", "expected"),
    [
        (64, 0.0, 1, 100, False),  # one server: its link is the limit, whoever reduces
        (64, 0.0, 8, 0, False),  # all on the master's machine
        (64, 0.0, 8, 1, False),
        (4, 0.0, 8, 8, True),
        (2, 0.0, 8, 8, False),
        (64, 0.75, 3, 16, True),
        (8, 0.75, 16, 16, False),
        (64, 0.99, 16, 16, False),  # less travels than the reduced gradient, which is dense
    ],
)
def test_workers_reduce_where_that_halves_the_bytes_of_the_fullest_link(
    shards: int, saved: float, nodes: int, hosts: int, expected: bool
) -> None:
    uplink_bytes = round(shards * GRADIENT * (1 - saved))
    assert pays(uplink_bytes, GRADIENT, nodes, hosts) is expected


def test_another_word_for_who_reduces_is_refused(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="'auto', 'master' or 'workers'"):
        make_trainer(make_mesh(), reduce="worker")
