"""What the examples show while they train: a display that stays in place, or lines where there is no terminal."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

LINE_EVERY = 2.0


@dataclass(slots=True)
class Facts:
    """How a run stands.

    Attributes:
        steps_per_s: over the last few steps; 0 before there are two.
        saved: share of the gradients' fp32 bytes that did not travel.
    """

    steps: int
    samples_per_step: int
    sample_name: str
    step: int = 0
    loss: float | None = None
    validation: tuple[int, float] | None = None
    steps_per_s: float = 0.0
    saved: float = 0.0
    workers: int = 0
    versions: int = 0
    refused: int = 0

    def figures(self) -> list[str]:
        """Each figure in words."""
        figures = ["loss -" if self.loss is None else f"loss {self.loss:.4f}"]
        if self.validation is None:
            figures.append("validation -")
        else:
            step, loss = self.validation
            figures.append(f"validation {loss:.4f} at step {step}")
        if self.steps_per_s:
            figures.append(f"{self.steps_per_s:.2f} steps/s")
            figures.append(f"{self.steps_per_s * self.samples_per_step:,.0f} {self.sample_name}/s")
        else:
            figures += ["- steps/s", f"- {self.sample_name}/s"]
        figures.append(f"{self.saved:.1%} fewer bytes")
        figures += [f"{_count(self.workers, 'worker')} alive", f"{_count(self.versions, 'version')} kept"]
        return [*figures, f"{_count(self.refused, 'shard')} refused"] if self.refused else figures


class Screen(logging.Handler):
    """The display; also where the log of taskmesh's training goes. A context manager."""

    def __init__(self, title: str, facts: Facts) -> None:
        super().__init__(logging.INFO)
        self._title = title
        self._facts = facts
        self._console = Console(highlight=False)
        self._started = time.monotonic()
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
        self._line_due = 0.0

    def __enter__(self) -> Screen:
        logging.getLogger("taskmesh").addHandler(self)
        logging.getLogger("taskmesh.checkpoints").setLevel(logging.INFO)  # tells who holds the lease
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("taskmesh").removeHandler(self)
        if self._live.is_started:
            self._live.stop()

    def emit(self, record: logging.LogRecord) -> None:
        self.say(record.getMessage())

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, markup=False, soft_wrap=True)

    def show(self, *, now: bool = False) -> None:
        """The facts have changed. Where there is no terminal, they are a line from time to time, or ``now``."""
        if not self._console.is_terminal and (now or time.monotonic() >= self._line_due):
            self.say("  ".join([f"step {self._facts.step:>4}", *self._facts.figures()]))
            self._line_due = time.monotonic() + LINE_EVERY

    def _render(self) -> RenderableType:
        facts = self._facts
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=facts.steps, completed=facts.step, width=20),
            f"step {facts.step} of {facts.steps}",
            Text(self._time(), style="dim"),
        )
        figures = Table.grid(padding=(0, 3))
        texts = facts.figures()
        for first in range(0, len(texts), 3):
            figures.add_row(*texts[first : first + 3])
        return Group(head, figures)

    def _time(self) -> str:
        spent = _clock(time.monotonic() - self._started)
        left = self._facts.steps - self._facts.step
        return (
            f"{spent}, {_clock(left / self._facts.steps_per_s)} to go"
            if self._facts.steps_per_s and left
            else spent
        )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
