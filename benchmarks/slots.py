"""The slot file: where a task marks that it ran, at the same small cost for every side.

One file, mapped by the driver and by every worker process. Slot i is task i's alone, so it needs no lock:

    d first_start   d last_end   I starts   I ends        (32 bytes with padding; CLOCK_MONOTONIC seconds)

CLOCK_MONOTONIC is one clock for all processes of a machine, so a worker's marks compare with the driver's
now. This module runs in the peers' environments too: standard library only.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

SLOT = struct.Struct("<ddII8x")
SIZE = SLOT.size
_mapped: mmap.mmap | None = None


def create(path: Path, count: int) -> mmap.mmap:
    """Make an empty slot file for `count` tasks and map it."""
    with path.open("w+b") as file:
        file.truncate(count * SIZE)
        return mmap.mmap(file.fileno(), 0)


def _map() -> mmap.mmap:
    global _mapped
    if _mapped is None:
        with open(os.environ["BENCH_SLOTS"], "r+b") as file:  # noqa: PTH123 (in a worker, once)
            _mapped = mmap.mmap(file.fileno(), 0)
    return _mapped


def start(task: int) -> None:
    """Mark that the task's handler has begun."""
    slots = _mapped or _map()
    now = time.monotonic()
    first, last, starts, ends = SLOT.unpack_from(slots, task * SIZE)
    SLOT.pack_into(slots, task * SIZE, first or now, last, starts + 1, ends)


def end(task: int) -> None:
    """Mark that the task's handler is about to return."""
    slots = _mapped or _map()
    now = time.monotonic()
    first, _last, starts, ends = SLOT.unpack_from(slots, task * SIZE)
    SLOT.pack_into(slots, task * SIZE, first, now, starts, ends + 1)


def mark(task: int) -> None:
    """Mark start and end at once: all that a no-op does."""
    slots = _mapped or _map()
    now = time.monotonic()
    first, _last, starts, ends = SLOT.unpack_from(slots, task * SIZE)
    SLOT.pack_into(slots, task * SIZE, first or now, now, starts + 1, ends + 1)


@dataclass(frozen=True, slots=True)
class Slot:
    """One task's marks, as the driver reads them."""

    first_start: float
    last_end: float
    starts: int
    ends: int


def read(slots: mmap.mmap, task: int) -> Slot:
    """The marks of one task."""
    return Slot(*SLOT.unpack_from(slots, task * SIZE))


def ended_up_to(slots: mmap.mmap, begin: int, count: int) -> int:
    """The first task at or after `begin` that has not ended, or `count` when all have.

    The driver carries the answer into its next call, so that watching a drain reads every slot about once.
    """
    unpack = SLOT.unpack_from
    task = begin
    while task < count and unpack(slots, task * SIZE)[3]:
        task += 1
    return task
