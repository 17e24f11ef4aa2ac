"""Whose task it was and when it started again, from the workers' journals.

Every worker notes starts and ends in a journal of its own, which survives it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.depth.app import Mark, read_journal


@dataclass
class Process:
    """A worker, and when it was killed (monotonic)."""

    process: subprocess.Popen[bytes]
    journal: Path
    killed: float | None = None

    def marks(self) -> list[Mark]:
        return list(read_journal(self.journal))


@dataclass
class Restarts:
    """Seconds from a worker's death to the start elsewhere of each task that it had in hand.

    Attributes:
        first: of tasks that nobody had died with before.
        again: of the others; they are suspects, which run one at a time.
        robbed: how many started elsewhere while their worker lived: its lease had run out.
        missing: tasks that were running and have not started again.
    """

    first: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    robbed: int = 0
    missing: list[int] = field(default_factory=list)

    def add(self, seconds: float, deliveries: int) -> None:
        if seconds < 0:
            self.robbed += 1
        elif deliveries > 1:
            self.again.append(seconds)
        else:
            self.first.append(seconds)


def find_restarts(workers: Iterable[Process]) -> Restarts:
    """What has become of the tasks of the workers that were killed."""
    journals = [(worker, worker.marks()) for worker in workers]
    starts: dict[int, list[Mark]] = {}
    for _, marks in journals:
        for mark in marks:
            if not mark.is_end:
                starts.setdefault(mark.task, []).append(mark)
    found = Restarts()
    for worker, marks in journals:
        if worker.killed is None:
            continue
        ended = {mark.task for mark in marks if mark.is_end}
        for mark in (mark for mark in marks if not mark.is_end):
            later = [other.at for other in starts[mark.task] if other.deliveries > mark.deliveries]
            if later:
                found.add(min(later) - worker.killed, mark.deliveries)
            elif mark.task not in ended:
                found.missing.append(mark.task)
    return found
