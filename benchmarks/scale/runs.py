"""Whole steps of real runs: a master, its servers and one to four workers on this machine."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import redis
import torch

from benchmarks.scale.settings import Setting
from benchmarks.training.fleet import Fleet
from benchmarks.training.lines import Program
from benchmarks.training.plan import Plan
from benchmarks.training.servers import Servers, servers
from benchmarks.training.stopwatch import read_parts
from benchmarks.training.works import NAP, make_work

TICKS = os.sysconf("SC_CLK_TCK")
ROLES = ("master", "workers", "servers")


class Observed(msgspec.Struct, frozen=True):
    """What a setting came to, medians.

    Attributes:
        step_s: from commit to commit.
        alone_s: a shard's forward and backward pass alone, beside what is only waited for.
        parts_s: of the step, as ``benchmarks.training.stopwatch`` has them.
        busy_s: processor seconds of a step, on the average, by who spends them: ``ROLES``.
    """

    setting: Setting
    step_s: float
    alone_s: float
    parts_s: dict[str, float]
    busy_s: dict[str, float]


class _Busy:
    """Processor seconds of a run's processes so far."""

    def __init__(self, urls: Servers, workers: Sequence[Program], master: Program) -> None:
        self._servers = [redis.Redis.from_url(url) for url in urls]
        self._workers, self.master = workers, master

    def read(self) -> dict[str, float]:
        cpu = [server.info("cpu") for server in self._servers]
        return {
            "master": _processor_seconds(self.master.pid),
            "workers": sum(_processor_seconds(worker.pid) for worker in self._workers),
            "servers": sum(each["used_cpu_sys"] + each["used_cpu_user"] for each in cpu),
        }

    def close(self) -> None:
        for server in self._servers:
            server.close()


def _processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def _follow(master: Program, steps: int, busy: _Busy) -> tuple[list[float], dict[str, float]]:
    """Seconds of each step but the first, and processor seconds of one."""
    moments = [float(master.until("commit")["at"])]
    before = busy.read()
    moments += [float(master.until("commit")["at"]) for _ in range(steps - 1)]
    after = busy.read()
    master.until("finished")
    lasted = [later - earlier for earlier, later in itertools.pairwise(moments)]
    return lasted, {role: (after[role] - before[role]) / (steps - 1) for role in ROLES}


def plan_of(setting: Setting, steps: int) -> Plan:
    """The run of a setting; the workers really compute where they do not wait."""
    return Plan(
        work="elsewhere",
        size=setting.parameters,
        shards=setting.shards,
        batch=setting.rows * setting.shards,
        steps=steps,
        compression=setting.compression,
        workers=setting.workers,
    )


def observe(setting: Setting, steps: int) -> Observed:
    """The last two thirds of a run's steps."""
    plan = plan_of(setting, steps)
    concurrency = 1 if setting.rounds == 1 else 2  # the next shard is fetched meanwhile, where there is one
    with servers() as both, tempfile.TemporaryDirectory(prefix="bench-marks-") as folder:
        marks = Path(folder, "marks")
        with Fleet(msgspec.structs.replace(plan, marks=str(marks)), both) as fleet:
            slowness = setting.compute_s / NAP
            workers = [fleet.worker(concurrency, slowness) for _ in range(setting.workers)]
            with contextlib.closing(_Busy(both, workers, fleet.master())) as busy:
                lasted, spent = _follow(busy.master, steps, busy)
        parts = read_parts(marks)
    step = statistics.median(lasted[len(lasted) // 3 :])
    return Observed(setting, step, compute_alone(setting), parts, spent)


def compute_alone(setting: Setting, rounds: int = 7) -> float:
    """Seconds of one shard's forward and backward pass, without its waits, on one thread with nothing beside it."""
    work = make_work(plan_of(setting, 1))
    model, rows = work.model(), work.data.fetch(range(setting.rows))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = []
    try:
        for _ in range(rounds):
            for parameter in model.parameters():  # a worker's gradient has its place, and is set to zero
                if parameter.grad is not None:
                    parameter.grad.zero_()
            began = time.perf_counter()
            work.loss(model, rows).sum().backward()  # type: ignore[no-untyped-call]
            found.append(time.perf_counter() - began)
    finally:
        torch.set_num_threads(threads)
    return min(found)  # whatever else the machine does only adds to it
