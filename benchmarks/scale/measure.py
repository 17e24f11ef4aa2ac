"""All that is measured, and the model that comes of it."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from benchmarks.scale.fit import Coefficients, fit, predict
from benchmarks.scale.parts import Parts, measure_parts
from benchmarks.scale.runs import Observed, observe
from benchmarks.scale.settings import Scale, Setting


class Measured(msgspec.Struct, frozen=True):
    """What was measured.

    Attributes:
        fitted: the runs that the model is fitted on.
        held_out: those that it is held against.
        machine: what it was measured on, and how busy that was before.
    """

    parts: Parts
    fitted: tuple[Observed, ...]
    held_out: tuple[Observed, ...]
    machine: dict[str, str]


class Check(NamedTuple):
    """A run, and what the model says of it."""

    setting: Setting
    measured_s: float
    predicted_s: float

    @property
    def error(self) -> float:
        """How much more is predicted than was measured, by what was measured."""
        return self.predicted_s / self.measured_s - 1


class Model(NamedTuple):
    """What predictions are made of, and how well it fits."""

    parts: Parts
    coefficients: Coefficients
    fitted: tuple[Check, ...]
    held_out: tuple[Check, ...]
    machine: dict[str, str]


def measure(scale: Scale) -> Measured:
    """Measure the parts, then the runs."""
    machine = describe_machine()
    parts = measure_parts(scale.part_bytes, scale.rounds)
    _say("parts: done")
    fitted = tuple(_observe(setting, scale.steps) for setting in scale.fitted)
    held_out = tuple(_observe(setting, scale.steps) for setting in scale.held_out)
    return Measured(parts, fitted, held_out, machine)


def model_of(measured: Measured) -> Model:
    """Fit it, and hold it against what it has not seen."""
    parts, found = measured.parts, fit(measured.fitted, measured.parts)
    fitted, held_out = (check(runs, parts, found) for runs in (measured.fitted, measured.held_out))
    return Model(parts, found, fitted, held_out, measured.machine)


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
    """This machine, and its load over the last five minutes."""
    return {
        "load": f"{os.getloadavg()[1]:.1f}",
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
