"""The steps of the run, each with its own keys, in two sizes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.training.checkpointing import measure_checkpoint_blocking
from benchmarks.training.crashes import measure_crashes
from benchmarks.training.dense import PARAMETERS, measure_dense
from benchmarks.training.link import measure_link
from benchmarks.training.overlap import measure_overlap
from benchmarks.training.parity import measure_parity
from benchmarks.training.reduce import measure_reduce
from benchmarks.training.standby import measure_standby
from benchmarks.training.stragglers import measure_stragglers
from benchmarks.training.transport import VALUES, measure_transport

Figures = dict[str, Any]


@dataclass(frozen=True)
class Scale:
    """How much is measured; ``--quick`` makes it small."""

    repeats: int = 3
    parameters: int = PARAMETERS
    dense_steps: int = 45
    transport_rounds: int = 15
    transport_values: int = VALUES
    rates: tuple[str, ...] = ("100mbit", "1gbit")
    link_seeds: int = 3
    link_steps: int = 200
    overlap_steps: int = 30
    overlap_parameters: int = 2_500_000
    reduce_steps: int = 15
    reduce_parameters: int = 2_500_000
    shards_per_worker: tuple[int, ...] = (8, 16, 32)
    straggler_steps: int = 7
    standby_kills: int = 7
    crashes: int = 50
    crash_steps: int = 100
    checkpoints: int = 3
    parity_seeds: int = 20
    parity_steps: int = 400
    seed: int = 1


QUICK = Scale(
    repeats=1,
    parameters=400_000,
    dense_steps=9,
    transport_rounds=3,
    transport_values=8,
    rates=("1gbit",),
    link_seeds=1,
    link_steps=10,
    overlap_steps=6,
    overlap_parameters=400_000,
    reduce_steps=6,
    reduce_parameters=400_000,
    shards_per_worker=(8,),
    straggler_steps=3,
    standby_kills=1,
    crashes=4,
    crash_steps=40,
    checkpoints=1,
    parity_seeds=3,
    parity_steps=20,
)


def say(text: str) -> None:
    """Progress goes to stderr: stdout is the answer."""
    print(text, file=sys.stderr, flush=True)


def dense(scale: Scale) -> Figures:
    """One step on loopback, and DDP's."""
    return measure_dense(scale.repeats, scale.dense_steps, scale.parameters)


def transport(scale: Scale) -> Figures:
    """Large values, and a bare socket's."""
    return measure_transport(scale.transport_rounds, scale.transport_values)


def slow_link(scale: Scale) -> Figures:
    """tiny_gpt over 100 Mbit/s and 1 Gbit/s."""
    return measure_link(scale.rates, scale.link_seeds, scale.link_steps)


def overlap(scale: Scale) -> Figures:
    """How much of the communication is hidden."""
    return measure_overlap(scale.repeats, scale.overlap_steps, scale.overlap_parameters)


def reduce(scale: Scale) -> Figures:
    """A step that the master reduces, and one that workers reduce."""
    return measure_reduce(scale.repeats, scale.reduce_steps, scale.reduce_parameters)


def stragglers(scale: Scale) -> Figures:
    """Two of four workers ten times slower."""
    return measure_stragglers(scale.shards_per_worker, scale.straggler_steps)


def standby(scale: Scale) -> Figures:
    """Killed masters."""
    return measure_standby(scale.standby_kills, scale.seed)


def crashes(scale: Scale) -> Figures:
    """The crash matrix."""
    return measure_crashes(scale.crashes, scale.seed, scale.crash_steps)


def checkpoint(scale: Scale) -> Figures:
    """What a checkpoint costs the steps around it."""
    return measure_checkpoint_blocking(checkpoints=scale.checkpoints, parameters=scale.parameters)


def parity(scale: Scale) -> Figures:
    """What compression costs and saves."""
    return measure_parity(scale.parity_seeds, scale.parity_steps)


STEPS: dict[str, Callable[[Scale], Figures]] = {
    "dense": dense,
    "transport": transport,
    "stragglers": stragglers,
    "standby": standby,
    "crashes": crashes,
    "checkpoint": checkpoint,
    "parity": parity,
    "overlap": overlap,
    "reduce": reduce,
    "link": slow_link,
}


def scale_of(*, quick: bool, repeats: int | None, seed: int | None) -> Scale:
    """The size that the options ask for."""
    scale = QUICK if quick else Scale()
    return replace(scale, repeats=repeats or scale.repeats, seed=scale.seed if seed is None else seed)
