"""A loss curve as a PNG picture. Needs matplotlib (the extra ``examples``)."""

from __future__ import annotations

import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from examples.curve import Curve, Kind

TRAINING, VALIDATION, TAKEN_AGAIN = "#4477aa", "#cc6677", "#999999"
MOST_MARKERS = 40
MARKS: dict[Kind, tuple[str, str, str]] = {
    "rolled back": ("#aa3377", "--", "rolled back"),
    "killed": ("#222222", "--", "master killed"),
    "stopped": ("#999933", "--", "stopped"),
    "worker gone": ("#ee8866", ":", "worker gone"),
}


def draw(curve: Curve, picture: Path, *, title: str, loss_unit: str) -> None:
    """Training and validation loss by step, with a mark wherever something went wrong."""
    figure = Figure(figsize=(9, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    _draw_training(axes, curve)
    _draw_validation(axes, curve)
    _draw_marks(axes, curve)
    axes.set_title(_headline(curve, title), loc="left")
    axes.set_xlabel("step")
    axes.set_ylabel(f"loss, {loss_unit}")
    _set_scale(axes, [point.value for point in curve.of("loss", "validation")])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(picture)


def _set_scale(axes: Axes, losses: list[float]) -> None:
    """Logarithmic where the losses span more than a decade; else that only squeezes them."""
    if max(losses) > 10 * min(losses) > 0:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")


def _headline(curve: Curve, title: str) -> str:
    if curve.validation is None:
        return f"{title}: {curve.step} steps"
    return f"{title}: {curve.step} steps, validation loss {curve.validation:.4g}"


def _draw_training(axes: Axes, curve: Curve) -> None:
    """What became of the run as a line, and what it took again after a crash or rollback as a lighter one."""
    losses: dict[int, float] = {}
    for point in curve.points:
        if point.kind == "loss":
            losses[point.step] = point.value
        elif point.kind in ("rolled back", "killed", "stopped"):
            again = sorted(step for step in losses if step > point.value)
            axes.plot(again, [losses[step] for step in again], color=TAKEN_AGAIN, lw=1, alpha=0.6)
            losses = {step: loss for step, loss in losses.items() if step <= point.value}
    steps = sorted(losses)
    values = [losses[step] for step in steps]
    axes.plot(steps, values, color=TRAINING, lw=0.8, alpha=0.35)
    axes.plot(steps, _smoothed(values), color=TRAINING, lw=2, label="training")


def _smoothed(values: list[float]) -> list[float]:
    """Means over up to a fortieth of the values to either side; over few where the loss falls fast, at the start."""
    widest = max(1, len(values) // 40)
    means: list[float] = []
    for at in range(len(values)):
        reach = min(widest, at)
        means.append(statistics.fmean(values[at - reach : at + reach + 1]))
    return means


def _draw_validation(axes: Axes, curve: Curve) -> None:
    losses = {point.step: point.value for point in curve.of("validation")}
    if losses:
        steps = sorted(losses)
        values = [losses[step] for step in steps]
        marker = "o" if len(steps) <= MOST_MARKERS else ""
        axes.plot(steps, values, color=VALIDATION, marker=marker, ms=4, lw=1.5, label="validation")


def _draw_marks(axes: Axes, curve: Curve) -> None:
    """A line where it happened, and a shade over the steps that were lost with it."""
    for kind, (colour, style, name) in MARKS.items():
        for place, point in enumerate(curve.of(kind)):
            axes.axvline(point.step, color=colour, ls=style, lw=1.2, label=None if place else name)
            if kind != "worker gone":
                axes.axvspan(point.value, point.step, color=colour, alpha=0.08, lw=0)
