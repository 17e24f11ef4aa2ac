"""The Mesh and the run of a plan: what ``taskmesh worker benchmarks.training.app:mesh`` and the master load."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from torch import nn

from benchmarks.training.overlap import hold_buckets
from benchmarks.training.plan import read_plan
from benchmarks.training.stopwatch import Stopwatch, watch
from benchmarks.training.works import Optimizer, make_trainer, make_work
from taskmesh import Mesh

plan = read_plan()
mesh = Mesh(plan.name)
work = make_work(plan)
stopwatch = Stopwatch(plan.marks) if plan.marks else None
if stopwatch is not None:
    work = watch(mesh, work, stopwatch)
if plan.hold:
    hold_buckets()
parameters: list[nn.Parameter] = []  # of the master's model, as they change


def _make_optimizer(given: Iterable[nn.Parameter]) -> Optimizer:
    parameters[:] = given
    return work.optimizer(parameters)


trainer = make_trainer(mesh, plan, dataclasses.replace(work, optimizer=_make_optimizer))
