"""Gathering rows: full, or as old as the oldest may get, and only where there is a slot."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from taskmesh.tasks import Batch
from taskmesh.testing import wait_until
from taskmesh.worker.batching import Batcher


class Row:
    """What a Batcher needs of a delivery."""

    def __init__(self, age: float = 0.0) -> None:
        self.arrived = time.monotonic() - age


class Slots:
    def __init__(self, free: int) -> None:
        self.free = free
        self.batches: list[int] = []

    def start(self, rows: list[Any]) -> bool:
        if not self.free:
            return False
        self.free -= 1
        self.batches.append(len(rows))
        return True


def fill(batcher: Batcher, count: int, age: float = 0.0) -> None:
    for _ in range(count):
        batcher.add(Row(age))  # type: ignore[arg-type]


async def test_a_full_batch_leaves_at_once() -> None:
    slots = Slots(10)
    batcher = Batcher(Batch(max_rows=4, max_wait=60), slots.start)
    fill(batcher, 9)
    assert slots.batches == [4, 4]
    assert batcher.waiting == 1


async def test_the_rest_leaves_when_the_oldest_is_due() -> None:
    slots = Slots(10)
    batcher = Batcher(Batch(max_rows=4, max_wait=0.05), slots.start)
    began = time.monotonic()
    fill(batcher, 2)
    await wait_until(lambda: slots.batches)
    assert slots.batches == [2]
    assert 0.05 <= time.monotonic() - began < 0.5


async def test_the_wait_counts_from_the_arrival_in_the_worker() -> None:
    slots = Slots(10)
    batcher = Batcher(Batch(max_rows=4, max_wait=30), slots.start)
    fill(batcher, 1, age=31)
    await asyncio.sleep(0.01)
    assert slots.batches == [1]


async def test_without_a_slot_rows_gather_and_a_freed_slot_takes_no_more_than_the_cap() -> None:
    slots = Slots(0)
    batcher = Batcher(Batch(max_rows=4, max_wait=0), slots.start)
    fill(batcher, 10)
    await asyncio.sleep(0.01)
    assert (slots.batches, batcher.waiting) == ([], 10)
    slots.free = 2
    batcher.flush()
    assert (slots.batches, batcher.waiting) == ([4, 4], 2)


async def test_rows_can_be_removed_and_taken() -> None:
    slots = Slots(10)
    batcher = Batcher(Batch(max_rows=4, max_wait=60), slots.start)
    rows: list[Any] = [Row(), Row(), Row()]
    for row in rows:
        batcher.add(row)
    assert batcher.remove(rows[1])
    assert not batcher.remove(rows[1])
    assert batcher.take() == [rows[0], rows[2]]
    assert batcher.waiting == 0
