"""The curves as a picture. Needs matplotlib (the extra ``examples``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.scale.measure import Model
from benchmarks.scale.predict import Cluster, curve, worker_counts

PARAMETERS = 100_000_000
LINKS = (1.0, 10.0, 100.0)
Line = tuple[str, str, str, str]  # topology, method, colour, style
TOPOLOGY_LINES: tuple[Line, ...] = (
    ("star", "fp32", "#cc6677", "-"),
    ("per host", "fp32", "#ee8866", "-"),
    ("sharded", "fp32", "#4477aa", "-"),
    ("sharded, per host", "fp32", "#66ccee", "-"),
    ("tree", "fp32", "#228833", "-"),
    ("groups", "fp32", "#aa3377", "-"),
    ("2D torus", "fp32", "#999933", "--"),
    ("DDP ring", "fp32", "#222222", "--"),
)
METHOD_LINES: tuple[Line, ...] = (
    ("star", "fp32", "#cc6677", "-"),
    ("star", "int8", "#cc6677", "--"),
    ("star", "Top-K 1% both ways", "#cc6677", ":"),
    ("sharded, per host", "fp32", "#66ccee", "-"),
    ("sharded, per host", "int8", "#66ccee", "--"),
    ("sharded, per host", "int8 both ways", "#66ccee", ":"),
    ("star", "DiLoCo 20", "#228833", "-"),
    ("star", "DiLoCo 100, int8", "#228833", "--"),
    ("sharded, per host", "DiLoCo 20", "#aa3377", "-"),
    ("DDP ring", "fp32", "#222222", "--"),
)


def draw(model: Model, picture: Path) -> None:
    """Seconds of a step by workers: the topologies above, compressions and local steps below, a column a link."""
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "scale", "font.size": 8}):
        figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
        rows = figure.subplots(2, len(LINKS), sharex=True, sharey=True)
        for axes, lines in zip(rows, (TOPOLOGY_LINES, METHOD_LINES), strict=True):
            for place, link in zip(axes, LINKS, strict=True):
                _panel(place, model, Cluster(PARAMETERS, link), lines)
            axes[0].set_ylabel("seconds a step")
            axes[-1].legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        for place, link in zip(rows[0], LINKS, strict=True):
            place.set_title(f"{link:g} Gbit/s a host", loc="left")
        for place in rows[1]:
            place.set_xlabel("workers")
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _panel(axes: Axes, model: Model, cluster: Cluster, lines: Sequence[Line]) -> None:
    counts = worker_counts(cluster.per_host)
    axes.axhline(cluster.compute_s, color="#bbbbbb", lw=1, label="computing alone")
    for topology, method, colour, style in lines:
        found = curve(topology, cluster, method, counts, model.parts, model.coefficients)
        name = topology if lines is TOPOLOGY_LINES else f"{topology}: {method}"
        axes.plot(counts, [each.step_s for each in found], color=colour, ls=style, lw=1.5, label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
