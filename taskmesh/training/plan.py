"""From a step to its shards: pure, and independent of how many workers there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from taskmesh.training.data import Sampler


class Owed(NamedTuple):
    """A shard that was drawn and has not entered a version: its batch, and its place among the shards of that."""

    batch: int
    shard: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        step: the number of the update, from 1.
        batches: the numbers of the batches that it is made from, from 0; several where shards take steps of their own.
        shards: sample indices of each logical shard, batch after batch; none is empty.
        lengths: how many of them are of each batch, by shard.
        extra: what its last shards are of: shards that came too late for earlier steps.
        first: the number of its first shard, by which orders, seeds and the ledger call it.
    """

    step: int
    batches: tuple[int, ...]
    shards: tuple[tuple[int, ...], ...]
    lengths: tuple[tuple[int, ...], ...]
    extra: tuple[Owed, ...] = ()
    first: int = 0

    @property
    def own(self) -> int:
        """How many shards are of its own batches."""
        return len(self.shards) - len(self.extra)

    @property
    def sources(self) -> tuple[int, ...]:
        """All the batches that it has samples of."""
        return tuple(sorted({*self.batches, *(each.batch for each in self.extra)}))

    def owed(self, shard: int) -> Owed:
        """What is owed when one of its shards does not come."""
        return Owed(self.batch, shard) if shard < self.own else self.extra[shard - self.own]

    @property
    def batch(self) -> int:
        """The first of the batches."""
        return self.batches[0]

    @property
    def drawn(self) -> int:
        """How many batches are drawn with it, skipped ones included."""
        return self.batches[-1] + 1

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


def make_plan(
    sampler: Sampler,
    step: int,
    drawn: int,
    skipped: Sequence[int],
    shards: int,
    batches: int = 1,
    extra: Sequence[Owed] = (),
) -> Plan:
    """The plan of update ``step``, after so many drawn batches, of so many more, and of what is owed of earlier ones.

    Args:
        extra: of what is owed, what it takes in.
    """
    numbers: list[int] = []
    for _ in range(batches):
        drawn = next_batch(drawn, skipped)
        numbers.append(drawn)
        drawn += 1
    return plan_of(sampler, step, numbers, shards, extra)


def plan_of_one(sampler: Sampler, unit: Owed, shards: int) -> Plan:
    """The plan of one shard of a batch alone. Its number and that of its step follow from what it is of."""
    chosen = split(sampler.batch(unit.batch), shards)[unit.shard]
    return Plan(unit.batch + 1, (unit.batch,), (chosen,), ((len(chosen),),), first=unit.shard)


def plan_of(
    sampler: Sampler, step: int, batches: Sequence[int], shards: int, extra: Sequence[Owed] = ()
) -> Plan:
    """The plan of update ``step``, from these batches, and from what is owed of earlier ones."""
    cut = [split(sampler.batch(number), shards) for number in batches]
    # A short batch, at the end of a data epoch, may have fewer samples than there are shards.
    width = max(map(len, cut))
    parts = [[pieces[shard] for pieces in cut if shard < len(pieces)] for shard in range(width)]
    parts += [[split(sampler.batch(each.batch), shards)[each.shard]] for each in extra]
    return Plan(
        step,
        tuple(batches),
        tuple(tuple(itertools.chain.from_iterable(part)) for part in parts),
        tuple(tuple(map(len, part)) for part in parts),
        tuple(extra),
    )
