"""Sums whose bits depend on the shards alone."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh.training.buckets import Bucket
from taskmesh.training.step.aggregate import Contribution, Pool, Round, TreeSum

BUCKETS = (Bucket(1, 3), Bucket(0, 1))


def leaves(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(count)
    return [
        (generator.standard_normal(50) * 10.0 ** generator.integers(-6, 6)).astype("f4") for _ in range(count)
    ]


def in_order(values: list[np.ndarray]) -> np.ndarray:
    """The tree, written down plainly."""
    while len(values) > 1:
        values = [sum(values[at + 1 : at + 2], start=values[at]) for at in range(0, len(values), 2)]
    return values[0]


@given(st.integers(1, 33), st.randoms(use_true_random=False))
def test_any_order_of_arrival_gives_the_same_bits(count: int, shuffle: random.Random) -> None:
    values = leaves(count)
    tree = TreeSum(count)
    order = list(range(count))
    shuffle.shuffle(order)
    for leaf in order:
        assert not tree.is_complete
        tree.add(leaf, values[leaf].copy())
    assert tree.is_complete
    assert tree.total().tobytes() == in_order(values).tobytes()


def without(values: list[np.ndarray | None]) -> np.ndarray:
    """The tree with leaves that are left out, written down plainly."""
    while len(values) > 1:
        pairs = [
            [each for each in values[at : at + 2] if each is not None] for at in range(0, len(values), 2)
        ]
        values = [sum(pair[1:], start=pair[0]) if pair else None for pair in pairs]
    assert values[0] is not None
    return values[0]


@given(st.integers(1, 33), st.data(), st.randoms(use_true_random=False))
def test_so_it_is_without_some_of_them(count: int, data: st.DataObject, shuffle: random.Random) -> None:
    there = data.draw(st.sets(st.integers(0, count - 1), min_size=1))
    values = leaves(count)
    tree = TreeSum(count)
    order = list(range(count))
    shuffle.shuffle(order)
    done: list[int] = []
    for leaf in order:
        done += tree.add(leaf, values[leaf].copy()) if leaf in there else tree.leave_out(leaf)
    wanted = without([value if leaf in there else None for leaf, value in enumerate(values)])
    assert tree.total().tobytes() == wanted.tobytes()
    assert sorted(done) == sorted(there)[1:]


def test_it_holds_few_arrays_when_they_come_in_turn() -> None:
    tree = TreeSum(64)
    for leaf in range(64):
        tree.add(leaf, np.ones(1, "f4"))
        assert len(tree._nodes) <= 7
    assert tree.total() == [64.0]


def test_a_leaf_comes_once() -> None:
    tree = TreeSum(2)
    tree.add(0, np.ones(1, "f4"))
    for leaf in (0, 2, -1):
        with pytest.raises(ValueError, match="leaf"):
            tree.add(leaf, np.ones(1, "f4"))
    with pytest.raises(ValueError, match="1 of 2"):
        tree.total()


def contribution(loss: float, count: int, floats: list[float], integers: list[int]) -> Contribution:
    return Contribution(loss, count, np.array(floats, "f4"), np.array(integers, np.int64))


def fill(round_: Round, shard: int, each: Contribution, gradient: float) -> None:
    round_.open(shard, each)
    for bucket in range(len(BUCKETS)):
        round_.memory(shard, bucket)[:] = gradient
        round_.add(shard, bucket)


def test_shards_of_1_and_63_weigh_as_they_should() -> None:
    round_ = Round(2, BUCKETS, Pool(3, 2))
    fill(round_, 1, contribution(63.0 * 2, 63, [4.0], [9]), 63.0 * 5)
    fill(round_, 0, contribution(1.0 * 8, 1, [0.0], [3]), 1.0 * 7)
    update = round_.update()
    assert update.count == 64
    assert update.loss == (8 + 126) / 64
    assert (update.gradient == np.float32((7 + 315) / 64)).all()
    assert update.floats[0] == 4.0 * 63 / 64, "float buffers are averaged by samples"
    assert update.integers.tolist() == [3], "integer buffers are the lowest shard's"


def test_the_order_does_not_show_in_a_round() -> None:
    seen = set()
    for order in itertools.permutations(range(4)):
        round_ = Round(4, BUCKETS, Pool(3, 2))
        for shard in order:
            fill(round_, shard, contribution(0.1 * shard, 3 + shard, [], []), 1e-3 * 7.0**shard)
        update = round_.update()
        seen.add((update.loss, update.gradient.tobytes()))
    assert len(seen) == 1


def test_a_round_without_some_shards_is_that_of_the_others() -> None:
    pool = Pool(3, 8)
    round_ = Round(4, BUCKETS, pool)
    round_.prepare(0)  # a piece of it came, its result did not
    fill(round_, 3, contribution(3.0, 3, [1.0], [7]), 9.0)
    round_.leave_out(0)
    assert not round_.is_open(2)
    round_.leave_out(2)
    fill(round_, 1, contribution(1.0, 1, [5.0], [5]), 3.0)
    update = round_.update()
    assert (update.count, update.loss) == (4, 1.0)
    assert update.gradient.tolist() == [3.0, 3.0, 3.0]
    assert update.floats.tolist() == [2.0]
    assert update.integers.tolist() == [5], "the lowest that is there"
    round_.release()
    assert len({values.ctypes.data for values in pool._free}) == len(pool._free) == 3


def test_what_was_added_stays_when_a_shard_begins_again() -> None:
    round_ = Round(2, BUCKETS, Pool(3, 2))
    round_.open(0, contribution(1.0, 1, [], []))
    round_.memory(0, 0)[:] = 5.0
    round_.add(0, 0)
    fill(round_, 1, contribution(1.0, 1, [], []), 3.0)
    round_.open(0, contribution(1.0, 1, [], []))
    assert round_.has(0, 0)
    assert not round_.has(0, 1)
    round_.memory(0, 1)[:] = 7.0
    round_.add(0, 1)
    assert round_.update().gradient.tolist() == [5.0, 4.0, 4.0]


def test_memory_is_used_again() -> None:
    pool = Pool(3, 4)
    used = set()
    for _ in range(5):
        round_ = Round(4, BUCKETS, pool)
        for shard in range(4):
            fill(round_, shard, contribution(1.0, 1, [], []), 1.0)
            used.add(round_.memory(0, 0).ctypes.data)
        used.add(round_.update().gradient.ctypes.data + 4)
        round_.release()
    assert len(pool._free) <= 3, "in turn, few are in use at once"
    assert len(used) <= 3
