"""The model of a step on one machine, and its coefficients by least squares. Pure functions.

A step begins (orders go out, workers look at the parameters), then gradients pass through four stages side by side,
bucket by bucket, and then it ends (optimizer, commit)::

    step     = begin + gradient + end
    begin    = begin_step_s + check_s_per_byte x bytes x max(1, workers / cores)
    gradient = longest + unhidden x (sum of the stages - longest stage)
               + slower x packing x max(1, workers / cores) + round_s x rounds + gradient_step_s
    end      = optimizer_step_s + commit_step_s + (optimizer_s_per_byte + commit_s_per_byte) x bytes

``machine`` is the processor time of all stages by the number of cores, which master, servers and workers share here;
``longest`` is the longest stage, or the machine if that is longer. The stages' seconds come from parts that were
measured alone. No coefficient may be negative (Lawson and Hanson, "Solving Least Squares Problems", 1974).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from scipy.optimize import nnls  # type: ignore[import-untyped]

from benchmarks.scale.parts import Parts
from benchmarks.scale.runs import ROLES, Observed
from benchmarks.scale.settings import Setting

TICK = 1e-3  # seconds: below that, a processor time of a step says little
TINY = 100_000  # parameters below which a shard costs what the engine does for it, and no bytes


class Coefficients(msgspec.Struct, frozen=True, kw_only=True):
    """What is fitted; seconds.

    Attributes:
        unhidden: the share of the shorter stages that does not pass beside the longest one.
        slower: by how much longer it takes a worker to compress than when nothing else is done to memory.
        round_s: of each shard after another on the same worker, beside its stages.
        task_s: processor seconds of a shard's message, order to result, by who spends them (``runs.ROLES``).
        check_s_per_byte: of a worker that is given parameters.
    """

    begin_step_s: float
    check_s_per_byte: float
    unhidden: float
    slower: float
    round_s: float
    gradient_step_s: float
    optimizer_step_s: float
    optimizer_s_per_byte: float
    commit_step_s: float
    commit_s_per_byte: float
    task_s: dict[str, float]


class Stages(NamedTuple):
    """What each stage of the gradients' way takes by itself, in seconds; the last is what all of them share."""

    workers: float
    sending: float
    servers: float
    master: float
    machine: float

    @property
    def longest(self) -> float:
        return max(self)

    @property
    def shorter(self) -> float:
        """The sum of the stages but for the longest."""
        alone = self[:-1]
        return sum(alone) - max(alone)


def stages_of(setting: Setting, alone_s: float, parts: Parts, task_s: Mapping[str, float]) -> Stages:
    """The stages of a step on one machine."""
    dense = setting.dense_bytes
    sent = dense * parts.share[setting.compression]
    local = alone_s + dense * parts.pack[setting.compression] + task_s["workers"]
    sending = parts.send.seconds(sent)
    servers = parts.take_in.seconds(sent) + parts.give_out.seconds(sent) + task_s["servers"]
    added = dense * (parts.unpack[setting.compression] + parts.add)
    master = parts.receive.seconds(sent) + added + task_s["master"]
    shards, rounds = setting.shards, setting.rounds
    return Stages(
        workers=rounds * (setting.compute_s + local),
        sending=rounds * sending,
        servers=shards * servers,
        master=shards * master,
        machine=shards * (local + sending + servers + master) / parts.cores,
    )


def solve(
    rows: Sequence[Mapping[str, float]], targets: Sequence[float], sizes: Sequence[float] | None = None
) -> dict[str, float]:
    """The non-negative coefficients, by name, with the least sum of squares of relative errors.

    Args:
        rows: of each equation, what each coefficient is multiplied by; one that is not named, by nothing.
        sizes: what each error is relative to; else the targets.
    """
    names = sorted({name for row in rows for name in row})
    weights = 1 / np.asarray(targets if sizes is None else sizes)
    matrix = np.array([[row.get(name, 0.0) for name in names] for row in rows]) * weights[:, None]
    scale = np.maximum(np.abs(matrix).max(axis=0), np.finfo(float).tiny)  # bytes are many, steps few
    found, _ = nnls(matrix / scale, np.asarray(targets) * weights)
    return dict(zip(names, (found / scale).tolist(), strict=True))


def _task_seconds(observed: Iterable[Observed]) -> dict[str, float]:
    """A shard's message by who spends processor time for it; of a worker, what its computing does not take."""
    tiny = [each for each in observed if each.setting.parameters < TINY]
    rows = [{"step": 1.0, "task": float(each.setting.shards)} for each in tiny]
    alone = min(each.alone_s for each in tiny)
    found = {}
    for role in ROLES:
        busy = [each.busy_s[role] for each in tiny]
        found[role] = solve(rows, busy, [max(seconds, TICK) for seconds in busy])["task"]
    return {**found, "workers": max(0.0, found["workers"] - alone)}


def _sharing(setting: Setting, cores: int) -> float:
    return max(1.0, setting.workers / cores)


def _begin_row(setting: Setting, cores: int) -> dict[str, float]:
    return {"begin_step_s": 1.0, "check_s_per_byte": setting.dense_bytes * _sharing(setting, cores)}


def _fit_begin(observed: Iterable[Observed], cores: int) -> dict[str, float]:
    """From runs in which no worker takes a second shard: there these parts begin and end as they say."""
    clean = [each for each in observed if each.setting.rounds == 1]
    targets = [each.parts_s["publish"] + each.parts_s["parameters"] for each in clean]
    return solve([_begin_row(each.setting, cores) for each in clean], targets)


def _fit_end(observed: Sequence[Observed]) -> dict[str, float]:
    sizes = [float(each.setting.dense_bytes) for each in observed]
    found: dict[str, float] = {}
    for part in ("optimizer", "commit"):
        rows = [{f"{part}_step_s": 1.0, f"{part}_s_per_byte": size} for size in sizes]
        found |= solve(rows, [each.parts_s[part] for each in observed])
    return found


def _begin_and_end(setting: Setting, cores: int, known: Mapping[str, float]) -> float:
    size = setting.dense_bytes
    begin = sum(known[name] * factor for name, factor in _begin_row(setting, cores).items())
    per_byte = known["optimizer_s_per_byte"] + known["commit_s_per_byte"]
    return begin + size * per_byte + known["optimizer_step_s"] + known["commit_step_s"]


def _gradient_row(setting: Setting, stages: Stages, parts: Parts) -> dict[str, float]:
    packing = setting.rounds * setting.dense_bytes * parts.pack[setting.compression]
    return {
        "unhidden": stages.shorter,
        "slower": packing * _sharing(setting, parts.cores),
        "round_s": float(setting.rounds),
        "gradient_step_s": 1.0,
    }


def fit(observed: Sequence[Observed], parts: Parts) -> Coefficients:
    """All coefficients."""
    task_s = _task_seconds(observed)
    known = {**_fit_begin(observed, parts.cores), **_fit_end(observed)}
    rows, targets = [], []
    for each in observed:
        stages = stages_of(each.setting, each.alone_s, parts, task_s)
        rows.append(_gradient_row(each.setting, stages, parts))
        targets.append(each.step_s - _begin_and_end(each.setting, parts.cores, known) - stages.longest)
    gradient = solve(rows, targets, [each.step_s for each in observed])
    return Coefficients(**known, **gradient, task_s=task_s)


def predict(setting: Setting, alone_s: float, parts: Parts, found: Coefficients) -> float:
    """Seconds of a step on the machine that the parts were measured on."""
    known: dict[str, float] = msgspec.structs.asdict(found)
    stages = stages_of(setting, alone_s, parts, found.task_s)
    beside = sum(known[name] * factor for name, factor in _gradient_row(setting, stages, parts).items())
    return _begin_and_end(setting, parts.cores, known) + stages.longest + beside
