"""A group's sums of buckets: in one order on all ranks, whatever each of them does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from taskmesh.training.buckets import Bucket
from taskmesh.training.fingerprint import fingerprint
from taskmesh.training.worker.sums import Sums

BUCKETS = [Bucket(0, 2), Bucket(2, 4), Bucket(4, 6)]


class Twice:
    """Two ranks that compute the same; a sum is there when it is waited for."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def begin_sum(self, values: Tensor) -> Any:
        self.begun.append(int(values.storage_offset() // 2))
        values.mul_(2)
        return self

    def is_completed(self) -> bool:
        return False

    def finish(self, work: Any) -> None:
        pass


def sums_of(own: Tensor, ranks: Twice, told: list[int]) -> tuple[Sums, Tensor]:
    into = torch.zeros(6)
    made: Any = Sums(ranks, BUCKETS, own, into, told.append)  # type: ignore[arg-type]
    return made, into


def test_buckets_are_summed_and_told_of_in_order() -> None:
    ranks, told = Twice(), list[int]()
    own = torch.arange(6.0)
    sums, into = sums_of(own, ranks, told)
    sums.add(2)
    assert ranks.begun == []
    sums.add(0)
    assert ranks.begun == [0]
    sums.add(1)
    assert ranks.begun == [0, 1, 2]
    sums.finish()
    assert told == [0, 1, 2]
    assert into.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert own.tolist() == list(range(6))


def test_a_bucket_that_changes_late_is_summed_again() -> None:
    ranks, told = Twice(), list[int]()
    own = torch.ones(6)
    sums, into = sums_of(own, ranks, told)
    for place in range(3):
        sums.add(place)
    own[2:4] = 5
    sums.add(1)
    sums.finish()
    assert sums.late == {1}
    sums.repeat([1])
    assert told == [0, 1, 2, 1]
    assert into.tolist() == [2.0, 2.0, 10.0, 10.0, 2.0, 2.0]


def test_a_rank_that_fails_takes_part_in_the_sums_that_the_others_wait_for() -> None:
    ranks, told = Twice(), list[int]()
    sums, _ = sums_of(torch.ones(6), ranks, told)
    sums.add(1)
    sums.settle()
    assert ranks.begun == [0, 1, 2]
    assert told == []


def test_a_group_is_not_like_a_single_process() -> None:
    assert fingerprint(1, 2) != fingerprint(1)
    assert fingerprint(1, 1) == fingerprint(1)
