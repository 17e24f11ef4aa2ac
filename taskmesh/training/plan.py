"""From a step to its shards: pure, and independent of how many workers there are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taskmesh.training.data import Sampler


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        step: the number of the update, from 1.
        batch: the number of the batch that it is made from, from 0.
        shards: sample indices of each logical shard; none is empty.
    """

    step: int
    batch: int
    shards: tuple[tuple[int, ...], ...]

    @property
    def samples(self) -> int:
        return sum(map(len, self.shards))


def split(indices: Sequence[int], shards: int) -> tuple[tuple[int, ...], ...]:
    """Cut a batch into up to ``shards`` runs of indices whose lengths differ by at most one, longer ones first."""
    count = min(shards, len(indices))
    short, longer = divmod(len(indices), count)
    cut: list[tuple[int, ...]] = []
    at = 0
    for shard in range(count):
        length = short + (shard < longer)
        cut.append(tuple(indices[at : at + length]))
        at += length
    return tuple(cut)


def next_batch(drawn: int, skipped: Sequence[int]) -> int:
    """The number of the next batch when ``drawn`` were drawn, and some are left out."""
    left_out = frozenset(skipped)
    while drawn in left_out:
        drawn += 1
    return drawn


def make_plan(sampler: Sampler, step: int, drawn: int, skipped: Sequence[int], shards: int) -> Plan:
    """The plan of update ``step``, after so many drawn batches."""
    batch = next_batch(drawn, skipped)
    return Plan(step, batch, split(sampler.batch(batch), shards))
