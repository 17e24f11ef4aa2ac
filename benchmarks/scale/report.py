"""Predictions as tables for people and as one JSON object. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from benchmarks.scale.measure import Check, Model, mean_error
from benchmarks.scale.predict import METHODS, Cluster, curve, worker_counts
from benchmarks.scale.topologies import TOPOLOGIES

SIZES = (10_000_000, 100_000_000, 1_000_000_000)
LINKS = (1.0, 10.0, 100.0)
SHOWN = (8, 64, 256, 1_000)
COMPARED = ("star", "sharded, per host")


def ways() -> list[tuple[str, str]]:
    """What is predicted: every topology with fp32, and two of them with every method."""
    plain = [(topology, "fp32") for topology in TOPOLOGIES]
    return plain + [(topology, method) for topology in COMPARED for method in METHODS if method != "fp32"]


def steps(model: Model, cluster: Cluster, counts: Sequence[int]) -> dict[str, dict[str, float]]:
    """Seconds of a step by way and number of workers."""
    return {
        f"{topology}, {method}": {
            str(each.workers): each.step_s
            for each in curve(topology, cluster, method, counts, model.parts, model.coefficients)
        }
        for topology, method in ways()
    }


def figures(model: Model) -> dict[str, Any]:
    """What ``--json`` prints."""
    predictions: dict[str, Any] = {}
    for parameters in SIZES:
        for link in LINKS:
            cluster = Cluster(parameters, link)
            by_way = steps(model, cluster, worker_counts(cluster.per_host))
            predictions.setdefault(str(parameters), {})[f"{link:g}gbit"] = {
                "compute_s": cluster.compute_s,
                "step_s": by_way,
            }
    return {
        "machine": model.machine,
        "parts": msgspec.to_builtins(model.parts),
        "coefficients": msgspec.to_builtins(model.coefficients),
        "fitted": [_told(each) for each in model.fitted],
        "held_out": [_told(each) for each in model.held_out],
        "fitted_mean_error": mean_error(model.fitted),
        "held_out_mean_error": mean_error(model.held_out),
        "held_out_largest_error": max(abs(each.error) for each in model.held_out),
        "predictions": predictions,
    }


def _told(each: Check) -> dict[str, Any]:
    return {
        **msgspec.to_builtins(each.setting),
        "measured_s": each.measured_s,
        "predicted_s": each.predicted_s,
    }


def in_words(model: Model) -> str:
    """For people."""
    blocks = [
        "coefficients\n" + "\n".join(_coefficients(model)),
        f"fitted: mean error {mean_error(model.fitted):.1%}\n" + _checks(model.fitted),
        f"held out: mean error {mean_error(model.held_out):.1%}\n" + _checks(model.held_out),
    ]
    blocks += [_prediction(model, Cluster(size, link)) for size in SIZES for link in LINKS]
    return "\n\n".join(blocks)


def _coefficients(model: Model) -> list[str]:
    found: dict[str, Any] = msgspec.to_builtins(model.coefficients)
    tasks = found.pop("task_s")
    named = found | {f"task_s of {role}": seconds for role, seconds in tasks.items()}
    return [f"  {name:24} {value:.4g}" for name, value in named.items()]


def _checks(checks: Sequence[Check]) -> str:
    heads = [
        "parameters",
        "workers",
        "shards",
        "compression",
        "compute s",
        "measured ms",
        "predicted ms",
        "error",
    ]
    rows = [
        [
            f"{each.setting.parameters:,}",
            str(each.setting.workers),
            str(each.setting.shards),
            each.setting.compression,
            f"{each.setting.compute_s:g}" if each.setting.compute_s or each.setting.rows == 1 else "real",
            f"{each.measured_s * 1e3:.1f}",
            f"{each.predicted_s * 1e3:.1f}",
            f"{each.error:+.1%}",
        ]
        for each in checks
    ]
    return _table([heads, *rows])


def _prediction(model: Model, cluster: Cluster) -> str:
    by_way = steps(model, cluster, SHOWN)
    heads = ["seconds a step", *(f"{count:,} workers" for count in SHOWN)]
    rows = [[way, *(f"{seconds:.3g}" for seconds in found.values())] for way, found in by_way.items()]
    title = (
        f"{cluster.parameters:,} parameters, {cluster.link_gbit_per_s:g} Gbit/s a host of {cluster.per_host}, "
        f"{cluster.compute_s:.3g} s to compute"
    )
    return f"{title}\n{_table([heads, *rows])}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join([f"  {row[0].ljust(widths[0])}", *cells]))
    return "\n".join(lines)
