"""Time: the one that decides is Redis's; the one that measures is monotonic."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """Where code that waits or measures takes its time from.

    Whatever two processes must agree on (leases, due times, expiry) is decided by the server's own
    TIME inside a script; ``offset_ms`` is added to it there, and is 0 outside tests.
    """

    @property
    def offset_ms(self) -> int: ...

    def monotonic(self) -> float: ...

    def on_jump(self, jumped: Callable[[], object]) -> Callable[[], None]:
        """Have ``jumped`` called whenever the offset changes; returns how to call it off."""
        ...


class SystemClock:
    """The machine's monotonic clock, and the server's time as it is."""

    offset_ms = 0

    def monotonic(self) -> float:
        return time.monotonic()

    def on_jump(self, jumped: Callable[[], object]) -> Callable[[], None]:
        return _nothing


def _nothing() -> None:
    pass
