"""What the demo shows: a progress line that lives, a story that scrolls, a table at the end."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

LABELS = {
    "accuracy": "held-out accuracy",
    "steps": "steps",
    "worker_killed_recovery_s": "recovery after SIGKILL, s",
    "rollbacks": "automatic rollbacks",
    "shards_refused": "shards refused",
    "uplink_bytes_saved_ratio": "gradient bytes saved",
    "rows_scored": "rows scored",
    "rows_per_s": "rows/s",
    "score_p99_s": "score p99 at half load, s",
    "tasks_lost": "tasks lost",
    "tasks_settled_twice": "tasks settled twice",
    "keys_leaked": "keys left over",
    "seconds": "seconds in all",
}


class Screen:
    """The demo's display; a context manager."""

    def __init__(self, *, to_stderr: bool) -> None:
        self._console = Console(stderr=to_stderr, highlight=False)
        self._progress = Progress(
            TextColumn("  training"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=False,
        )
        self._bar = self._progress.add_task("training", total=None, loss="-", start=False, visible=False)
        self._started = time.monotonic()

    def __enter__(self) -> Screen:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        """One line of the story, above the progress."""
        line = Table.grid(padding=(0, 2))
        line.add_row(f"[dim]{time.monotonic() - self._started:6.1f} s[/dim]", text)
        self._progress.console.print(line)

    def step(self, step: int, steps: int, loss: float) -> None:
        """A step was committed."""
        self._progress.start_task(self._bar)
        self._progress.update(self._bar, completed=step, total=steps, loss=f"{loss:.4f}", visible=True)

    def summary(self, report: dict[str, Any], held: bool) -> None:
        """The figures, and whether everything held."""
        table = Table(show_header=False, box=None, padding=(0, 2))
        for name, value in report.items():
            table.add_row(LABELS[name], _text(value))
        self._console.print()
        self._console.print(table)
        verdict = (
            "[green]Everything held.[/green]" if held else "[red]Something did not hold: see above.[/red]"
        )
        self._console.print(f"\n  {verdict}")


def _text(value: float) -> str:
    return f"{value:,.0f}" if isinstance(value, int) or value >= 1000 else f"{value:.4g}"
