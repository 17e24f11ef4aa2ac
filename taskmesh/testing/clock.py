"""A clock that tests move: Redis time as the scripts see it jumps, nobody sleeps."""

from __future__ import annotations

import time


class MovableClock:
    """Passed as ``Mesh(clock=...)``: what is due, expires or was last seen is reckoned with its offset.

    Every process of a test that must agree on the time needs the same offset.
    """

    def __init__(self, offset_ms: int = 0) -> None:
        self.offset_ms = offset_ms

    def monotonic(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let so much time pass at once."""
        self.offset_ms += int(seconds * 1000)
