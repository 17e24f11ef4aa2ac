"""A clock that tests move: Redis time as the scripts see it jumps, nobody sleeps."""

from __future__ import annotations

import time
from collections.abc import Callable


class MovableClock:
    """Passed as ``Mesh(clock=...)``: what is due, expires or was last seen is reckoned with its offset.

    Workers of this process hear of a jump at once. Every process of a test that must agree on the time needs the same
    offset. What a process measures for itself goes on at its own pace: timeouts of handlers and of ``result``, the
    time for which a dead worker must have been silent, and the times to live of Redis keys, result records among them.

    Attributes:
        offset_ms: how far Redis time is ahead.
    """

    def __init__(self, offset_ms: int = 0) -> None:
        self.offset_ms = offset_ms
        self._listeners: list[Callable[[], object]] = []

    def monotonic(self) -> float:
        return time.monotonic()

    def advance(self, seconds: float) -> None:
        """Let so much time pass at once. To be called where the workers run: in their event loop."""
        self.offset_ms += int(seconds * 1000)
        for jumped in list(self._listeners):
            jumped()

    def on_jump(self, jumped: Callable[[], object]) -> Callable[[], None]:
        """Have ``jumped`` called whenever the offset changes; returns how to call it off."""
        self._listeners.append(jumped)
        return lambda: self._listeners.remove(jumped)
