"""What the demo has to show."""

from __future__ import annotations

from dataclasses import dataclass

ACCURACY_WANTED = 0.97


@dataclass
class Report:
    """The figures of one run; durations are seconds."""

    accuracy: float = 0.0
    steps: int = 0
    worker_killed_recovery_s: float = 0.0
    rollbacks: int = 0
    shards_refused: int = 0
    uplink_bytes_saved_ratio: float = 0.0
    rows_scored: int = 0
    rows_per_s: float = 0.0
    score_p99_s: float = 0.0
    tasks_lost: int = 0
    tasks_settled_twice: int = 0
    keys_leaked: int = 0
    seconds: float = 0.0

    @property
    def held(self) -> bool:
        """Whether everything was as it must be, and everything that was to happen did."""
        books = self.tasks_lost or self.tasks_settled_twice or self.keys_leaked
        happened = self.worker_killed_recovery_s > 0 and self.shards_refused > 0 and self.rollbacks > 0
        return not books and happened and self.accuracy >= ACCURACY_WANTED
