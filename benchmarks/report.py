"""From the repeats of every side to what is printed: medians, ratios, the table. Pure functions."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

Figures = Mapping[str, float | None]

MORE_IS_BETTER = (
    "drain_per_s",
    "drain_results_per_s",
    "drain_suspending_results_per_s",
    "sleep_10ms_per_s",
    "submit_bulk_per_s",
)
LESS_IS_BETTER = ("round_trip_p50_s", "round_trip_p99_s", "bytes_per_queued_task", "idle_worker_rss_mb")
LEFT_BEHIND = ("keys_left", "stream_entries_left")
SIDE_KEYS = (*MORE_IS_BETTER, *LESS_IS_BETTER, *LEFT_BEHIND, "shortest_drain_s")
BARE_KEYS = ("bare_sleep_10ms_per_s", "bare_round_trip_p50_s", "bare_round_trip_p99_s")
OUR_KEYS = ("delayed_lateness_p99_s", "recovery_after_kill_s", "liveness_ttl_s")

# heading, factor, decimals
COLUMNS: dict[str, tuple[str, float, int]] = {
    "drain_per_s": ("drain/s", 1, 0),
    "drain_results_per_s": ("+results/s", 1, 0),
    "drain_suspending_results_per_s": ("+suspend/s", 1, 0),
    "sleep_10ms_per_s": ("10 ms/s", 1, 0),
    "submit_bulk_per_s": ("bulk/s", 1, 0),
    "round_trip_p50_s": ("p50 ms", 1e3, 2),
    "round_trip_p99_s": ("p99 ms", 1e3, 2),
    "bytes_per_queued_task": ("B/queued", 1, 0),
    "idle_worker_rss_mb": ("RSS MB", 1, 1),
    "keys_left": ("keys left", 1, 0),
    "stream_entries_left": ("left in streams", 1, 0),
}


def medians(repeats: Sequence[Figures], keys: Sequence[str]) -> dict[str, float | None]:
    """The median of each key over the repeats that have it; None where none has."""
    found: dict[str, float | None] = {}
    for key in keys:
        values = [value for repeat in repeats if (value := repeat.get(key)) is not None]
        found[key] = statistics.median(values) if values else None
    return found


def ratios(ours: Figures, peers: Mapping[str, Figures]) -> dict[str, dict[str, float | str]]:
    """Ours by the best peer's, key by key, with that peer's name.

    Above 1 is better for the keys in MORE_IS_BETTER, below 1 for those in LESS_IS_BETTER.
    """
    answer: dict[str, dict[str, float | str]] = {}
    for key in (*MORE_IS_BETTER, *LESS_IS_BETTER):
        mine = ours.get(key)
        theirs = {name: value for name, figures in peers.items() if (value := figures.get(key)) is not None}
        if mine is None or not theirs:
            continue
        choose = max if key in MORE_IS_BETTER else min
        best = choose(theirs, key=lambda name: theirs[name])
        answer[key] = {"ratio": mine / theirs[best], "peer": best, "peer_value": theirs[best]}
    return answer


def table(sides: Mapping[str, Figures]) -> str:
    """The sides as rows, for a person to read."""
    rows = [["", *(heading for heading, _, _ in COLUMNS.values())]]
    for name, figures in sides.items():
        cells = [_cell(figures.get(key), factor, decimals) for key, (_, factor, decimals) in COLUMNS.items()]
        rows.append([name, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
    return "\n".join(lines)


def _cell(value: float | None, factor: float, decimals: int) -> str:
    return "-" if value is None else f"{value * factor:,.{decimals}f}"
