"""Ranges of a step's gradient that workers reduce: what they are told and what they answer, and when that pays."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from taskmesh.training.buckets import Bucket
from taskmesh.training.orders import ShardResult

LEAST_GAIN = 2.0
MOST_VALUES = 2**24  # of a range: whoever reduces it holds it several times


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one shard sent of the buckets of a range: where it lies and what it must be.

    Attributes:
        attempt: names the delivery that sent them.
        count: samples (or tokens) of the shard.
    """

    shard: int
    attempt: str
    count: int
    sizes: tuple[int, ...]
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class ReduceOrder:
    """What a worker is told to reduce.

    Attributes:
        shards: of the step; the sum is a tree over so many.
        first: the place of the first of the buckets.
        pieces: of each shard that is in the step, in the order of the shards.
        agreement: what this master and its workers must have alike (``RunSetup.agreement``).
        avoid: workers that leave it to others.
    """

    version: int
    step: int
    shards: int
    first: int
    buckets: tuple[Bucket, ...]
    pieces: tuple[Pieces, ...]
    agreement: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReduceResult:
    """What came of it.

    The mean gradient of each bucket lies in a piece of its own, as fp32 values.

    Attributes:
        status: "reduced"; "refused" when pieces of some shards cannot be used; "declined" by a worker that was to be
            avoided.
        refused: those shards, by number, with the reasons.
        attempt: names the delivery.
        digests: of each piece.
    """

    status: Literal["reduced", "refused", "declined"]
    worker: str
    refused: tuple[tuple[int, str], ...] = ()
    attempt: str = ""
    digests: tuple[bytes, ...] = ()


def pieces_of(shard: int, result: ShardResult, places: range) -> Pieces:
    """What a shard's result names in a range."""
    chosen = slice(places.start, places.stop)
    return Pieces(shard, result.attempt, result.count, result.sizes[chosen], result.digests[chosen])


def cut_ranges(buckets: Sequence[Bucket], workers: int) -> list[range]:
    """Cut the places of buckets into ranges of about equally many values: one a worker, or more of ``MOST_VALUES``."""
    ranges: list[range] = []
    start = gathered = 0
    left = sum(bucket.size for bucket in buckets)
    count = max(workers, math.ceil(left / MOST_VALUES))
    for place, bucket in enumerate(buckets):
        gathered += bucket.size
        if gathered * (count - len(ranges)) >= left:
            ranges.append(range(start, place + 1))
            left -= gathered
            start, gathered = place + 1, 0
    return ranges


def pays(uplink_bytes: int, dense_bytes: int, nodes: int, hosts: int) -> bool:
    """Whether a step is reduced sooner by workers than by its master, by the bytes through the fullest link.

    Through the master's link goes all that the shards send. When workers reduce, that goes through as many links at
    once as both the servers and the workers have, and so does what they write back; the master fetches one gradient
    as it is. With a single server nothing is won: its own link carries no less than before. The master fetches while
    shards are still being computed, workers only afterwards: that is what the gain has to outweigh.

    Args:
        uplink_bytes: what the shards of a step send.
        dense_bytes: of one gradient, as fp32 values.
        nodes: servers that gradients are spread over.
        hosts: machines of workers other than the master's.
    """
    lanes = min(nodes, hosts)
    if lanes < 1:
        return False
    by_workers = (uplink_bytes + dense_bytes) / lanes + dense_bytes
    return uplink_bytes >= LEAST_GAIN * by_workers
