"""How much to fetch ahead: measured work, not a count."""

from __future__ import annotations


class Pace:
    """Completions a second while there is work, smoothed over windows of at least 5 ms.

    Args:
        slots: handlers that run at once. So many may end together after any time, and say nothing about the pace.
    """

    WINDOW = 0.005
    LONGEST_GAP = 0.25

    def __init__(self, horizon: float, slots: int = 0) -> None:
        self._horizon = horizon
        self._slots = slots
        self._rate = 0.0
        self._count = 0
        self._since = 0.0
        self._last = 0.0

    def ended(self, count: int, now: float) -> None:
        """So many deliveries ended."""
        if now - self._last > self.LONGEST_GAP:
            # After a pause without endings, the pause says nothing about the work.
            self._since, self._count, self._last = now, 0, now
            return
        self._count += count
        self._last = now
        elapsed = now - self._since
        if elapsed < self.WINDOW:
            return
        rate = self._count / elapsed
        # Slowing down counts at once, speeding up by and by: what lies here waits for this worker alone.
        if rate < self._rate:
            self._rate = rate
        elif self._count > self._slots:
            self._rate = 0.5 * (self._rate + rate)
        else:
            return
        self._count = 0
        self._since = now

    def stalled(self) -> None:
        """Nothing ends any more: what was measured before says nothing about the work at hand."""
        self._rate = 0.0

    @property
    def ahead(self) -> int:
        """Deliveries that may wait here beyond the free slots."""
        return int(self._horizon * self._rate)
