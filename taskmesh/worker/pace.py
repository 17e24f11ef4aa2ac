"""How much to fetch ahead: measured work, not a count."""

from __future__ import annotations


class Pace:
    """Completions a second while there is work, smoothed over windows of at least 5 ms."""

    WINDOW = 0.005

    def __init__(self, horizon: float, most: int) -> None:
        self._horizon = horizon
        self._most = most
        self._rate = 0.0
        self._count = 0
        self._since: float | None = None

    def ended(self, count: int, now: float) -> None:
        """So many deliveries ended."""
        if self._since is None:
            self._since = now
        self._count += count
        elapsed = now - self._since
        if elapsed >= self.WINDOW:
            rate = self._count / elapsed
            # Slowing down counts at once, speeding up by and by: what lies here waits for this worker alone.
            self._rate = rate if rate < self._rate else 0.5 * (self._rate + rate)
            self._count = 0
            self._since = now

    def idle(self) -> None:
        """There was nothing to do: the time until the next ending says nothing about the work."""
        self._since = None
        self._count = 0

    @property
    def ahead(self) -> int:
        """Deliveries that may wait here beyond the free slots."""
        return min(self._most, int(self._horizon * self._rate))
