"""Time, bytes and validation loss of a run on its way down. Evaluations are off the clock, on either side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

from benchmarks.training.lines import tell
from benchmarks.training.plan import Chase
from benchmarks.training.works import Work


class Traffic:
    """Bytes that the left side of the link has sent (down) and received (up), as its interface counts them."""

    def __init__(self, interface: str) -> None:
        self._folder = Path("/sys/class/net", interface, "statistics") if interface else None
        self._began = self._count()

    def _count(self) -> tuple[int, int]:
        if self._folder is None:
            return 0, 0
        up, down = (int((self._folder / name).read_text()) for name in ("rx_bytes", "tx_bytes"))
        return up, down

    def since_start(self) -> tuple[int, int]:
        up, down = self._count()
        return up - self._began[0], down - self._began[1]


class Clock:
    """Runs, but for the evaluations."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._since = time.perf_counter()

    def stop(self) -> None:
        self.seconds += time.perf_counter() - self._since

    def go_on(self) -> None:
        self._since = time.perf_counter()


class Chaser:
    """Follows one run; to be made when it begins.

    Args:
        parameters: those that the run changes, as they are at any moment.
    """

    def __init__(self, chase: Chase, work: Work, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        assert work.validate is not None
        self._chase = chase
        self._validate = work.validate
        self._model = work.model()
        self._parameters = parameters
        self._traffic = Traffic(chase.interface)
        self._clock = Clock()

    def has_arrived(self, step: int) -> bool:
        """Evaluate where it is time to, and tell of it. Returns whether the target is reached."""
        if step % self._chase.every:
            return False
        self._clock.stop()
        up, down = self._traffic.since_start()
        for mine, theirs in zip(self._model.parameters(), self._parameters(), strict=True):
            mine.data = theirs.data
        loss = self._validate(self._model)
        target = self._chase.target
        arrived = target is not None and loss <= target
        tell(
            evaluated=step,
            loss=loss,
            seconds=self._clock.seconds,
            bytes_up=up,
            bytes_down=down,
            arrived=arrived,
        )
        self._clock.go_on()
        return arrived
