"""All that is measured, and what is fitted to it."""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch

from benchmarks.scale.fit import Coefficients, fit, predict
from benchmarks.scale.parts import Parts, measure_parts
from benchmarks.scale.runs import Observed, observe
from benchmarks.scale.settings import Scale, Setting


class Check(msgspec.Struct, frozen=True):
    """A run, and what the model says of it; ``error`` is how much that is above what was measured, by it."""

    setting: Setting
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


class Measured(msgspec.Struct, frozen=True):
    """What predictions are made of.

    Attributes:
        fitted: the runs that the coefficients were fitted to.
        held_out: others.
    """

    parts: Parts
    coefficients: Coefficients
    fitted: tuple[Check, ...]
    held_out: tuple[Check, ...]
    machine: dict[str, str]


def measure(scale: Scale) -> Measured:
    """Measure the parts and the runs, and fit."""
    parts = measure_parts(scale.part_bytes, scale.rounds)
    _say("parts: done")
    fitted = [_observe(setting, scale.steps) for setting in scale.fitted]
    held_out = [_observe(setting, scale.steps) for setting in scale.held_out]
    found = fit(fitted, parts)
    return Measured(
        parts, found, check(fitted, parts, found), check(held_out, parts, found), describe_machine()
    )


def check(observed: Sequence[Observed], parts: Parts, found: Coefficients) -> tuple[Check, ...]:
    """Predicted beside measured."""
    return tuple(
        Check(each.setting, each.step_s, predict(each.setting, each.alone_s, parts, found))
        for each in observed
    )


def mean_error(checks: Sequence[Check]) -> float:
    """Of the errors' magnitudes."""
    return statistics.fmean(abs(each.error) for each in checks)


def describe_machine() -> dict[str, str]:
    """Where this was measured."""
    return {
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
    }


def read(path: Path) -> Measured:
    """What an earlier run has measured.

    Raises:
        msgspec.ValidationError: the file holds something else.
    """
    return msgspec.json.decode(path.read_bytes(), type=Measured)


def write(measured: Measured, path: Path) -> None:
    """Keep it for another run."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(measured)) + b"\n")


def _observe(setting: Setting, steps: int) -> Observed:
    began = time.monotonic()
    observed = observe(setting, steps)
    _say(f"{setting} ({time.monotonic() - began:.0f} s): {observed.step_s:.4f} s a step")
    return observed


def _say(text: str) -> None:
    """Progress goes to stderr: stdout is the answer."""
    print(text, file=sys.stderr, flush=True)
