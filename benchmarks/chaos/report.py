"""The run in words, and as one JSON object."""

from __future__ import annotations

import json
from typing import Any

from benchmarks.chaos.run import Report

COUNTS = (
    "accepted",
    "succeeded",
    "failed",
    "cancelled",
    "expired",
    "dead_lettered",
    "lost",
    "settled_twice",
    "undone_by_failover",
    "duplicate_starts",
)
BESIDE = ("acknowledged", "unacknowledged", "undone_submits", "undone_settles")


def figures(report: Report) -> dict[str, Any]:
    """What ``--json`` prints."""
    account, options = report.account, report.options
    p50, p99 = account.recovery
    return {
        "topology": options.topology,
        "seed": options.seed,
        "seconds": options.seconds,
        "primary_loss": options.primary_loss,
        **{name: account.counts[name] for name in (*COUNTS, *BESIDE)},
        "recovery_p50_s": _rounded(p50),
        "recovery_p99_s": _rounded(p99),
        "recoveries": len(account.recoveries),
        "drain_s": _rounded(report.drain_seconds),
        "other_problems": sum(problem.kind not in ("lost", "settled_twice") for problem in account.problems),
        "faults": {str(kind): count for kind, count in sorted(report.faults.items())},
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def in_words(report: Report) -> str:
    """For people."""
    shown = figures(report)
    faults = shown.pop("faults")
    lines = [f"{name:>20}  {value}" for name, value in shown.items()]
    lines += ["faults:"] + [f"{name:>24}  {count}" for name, count in faults.items()]
    return "\n".join([*lines, *report.stories])


def as_json(report: Report) -> str:
    """One line."""
    return json.dumps(figures(report))
