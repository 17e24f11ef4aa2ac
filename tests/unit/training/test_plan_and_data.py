"""Which samples go where."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh.errors import ConfigurationError
from taskmesh.training.data import Sampler
from taskmesh.training.plan import Owed, make_plan, next_batch, split
from taskmesh.training.step.progress import Progress


@given(st.integers(1, 200), st.integers(1, 64), st.integers(0, 3))
def test_every_index_once_in_a_data_epoch(samples: int, batch_size: int, epoch: int) -> None:
    sampler = Sampler(samples, batch_size, seed=5)
    first = epoch * sampler.batches_per_epoch
    batches = [sampler.batch(first + place) for place in range(sampler.batches_per_epoch)]
    assert sorted(index for batch in batches for index in batch) == list(range(samples))
    assert {len(batch) for batch in batches[:-1]} <= {batch_size}


def test_the_order_is_another_in_each_epoch_and_the_same_for_a_seed() -> None:
    sampler = Sampler(100, 100, seed=1)
    assert sampler.batch(0) != sampler.batch(1)
    assert sampler.batch(0) == Sampler(100, 100, seed=1).batch(0), "after looking at a later epoch too"
    assert sampler.batch(0) != Sampler(100, 100, seed=2).batch(0)


@given(st.lists(st.integers(), min_size=1, max_size=100), st.integers(1, 16))
def test_shards_are_even_and_none_is_empty(indices: list[int], shards: int) -> None:
    cut = split(indices, shards)
    assert [index for shard in cut for index in shard] == indices
    lengths = [len(shard) for shard in cut]
    assert len(cut) == min(shards, len(indices))
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


def test_103_samples_in_4_shards() -> None:
    sampler = Sampler(103, 32, seed=0)
    plans = [make_plan(sampler, step + 1, step, (), 4) for step in range(4)]
    assert [plan.samples for plan in plans] == [32, 32, 32, 7]
    assert Counter(index for plan in plans for shard in plan.shards for index in shard) == Counter(range(103))


def test_batches_that_are_left_out_are_passed_over() -> None:
    assert next_batch(4, (4, 5, 9)) == 6
    assert next_batch(6, (4, 5, 9)) == 6
    plan = make_plan(Sampler(10, 5, 0), step=3, drawn=2, skipped=(2,), shards=2)
    assert (plan.step, plan.batch, plan.drawn) == (3, 3, 4)


def test_a_plan_of_several_batches_deals_each_of_them_out() -> None:
    sampler = Sampler(103, 20, seed=2)
    plan = make_plan(sampler, 1, 3, (4,), shards=8, batches=3)
    assert plan.batches == (3, 5, 6)
    assert [len(lengths) for lengths in plan.lengths] == [3, 3, 3, 2, 2, 2, 2, 2]
    assert [sum(lengths) for lengths in plan.lengths] == [len(shard) for shard in plan.shards]
    wanted = [index for number in plan.batches for index in sampler.batch(number)]
    assert Counter(index for shard in plan.shards for index in shard) == Counter(wanted)


def test_what_is_owed_is_planned_as_further_shards() -> None:
    sampler = Sampler(103, 32, seed=0)
    plan = make_plan(sampler, 6, 4, (), 4, extra=(Owed(1, 2), Owed(3, 0)))
    assert (plan.own, len(plan.shards), plan.sources) == (4, 6, (1, 3, 4))
    assert plan.shards[4:] == (split(sampler.batch(1), 4)[2], split(sampler.batch(3), 4)[0])
    assert [sum(lengths) for lengths in plan.lengths] == [len(shard) for shard in plan.shards]
    assert [plan.owed(shard) for shard in (3, 4, 5)] == [Owed(4, 3), Owed(1, 2), Owed(3, 0)]


def test_what_is_late_is_owed_until_it_comes() -> None:
    sampler = Sampler(103, 32, seed=0)
    progress = Progress(step=3, drawn=3, owed=(Owed(0, 1), Owed(0, 2), Owed(2, 0)))
    plan = make_plan(sampler, 4, 3, (), 4, extra=progress.owed[:2])
    after = progress.after(plan, late=(0, 2, 5))
    assert (after.step, after.drawn) == (4, 4)
    assert after.owed == (Owed(0, 2), Owed(2, 0), Owed(3, 0), Owed(3, 2))
    assert progress.after(plan).owed == (Owed(2, 0),)
    left = after.leave_out((3, 9))
    assert (left.skipped, left.owed) == ((3, 9), (Owed(0, 2), Owed(2, 0)))


@pytest.mark.parametrize(("samples", "batch_size"), [(0, 1), (1, 0)])
def test_no_samples_and_no_batch_are_refused(samples: int, batch_size: int) -> None:
    with pytest.raises(ConfigurationError):
        Sampler(samples, batch_size, 0)
