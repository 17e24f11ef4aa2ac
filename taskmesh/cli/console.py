"""What the terminal sees: tables, one line for an error, the log's format."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Sequence

from taskmesh.errors import TaskmeshError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as aligned columns; numbers to the right."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[place]) for row in [list(titles), *cells]) for place in range(len(titles))]
    is_number = [
        bool(rows) and all(isinstance(row[place], (int, float)) for row in rows)
        for place in range(len(titles))
    ]
    lines = []
    for row in [list(titles), *cells]:
        parts = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def duration(seconds: float | None) -> str:
    """Seconds in short: "-", "80 ms", "2.5 s", "12 min", "3.1 h"."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def report(error: BaseException, *, debug: bool) -> None:
    """Say on stderr, in one line, what went wrong; with ``debug`` the traceback comes first."""
    if debug:
        traceback.print_exception(error)
    if isinstance(error, TaskmeshError):
        text = str(error) or type(error).__name__
    else:
        text = f"unexpected {type(error).__name__}: {error} (taskmesh --debug shows the traceback)"
    print(f"taskmesh: {' '.join(text.split())}", file=sys.stderr, flush=True)


def start_log(level: str) -> None:
    """Log to stderr from this level on."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    )
