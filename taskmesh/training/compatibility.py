"""What goes with what: the choices of a run that would not do what they say together, and why."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from taskmesh.checkpoints.retention import Every
from taskmesh.errors import ConfigurationError
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression import DGC, TopK
from taskmesh.training.compression.base import Compression
from taskmesh.training.execution import Execution
from taskmesh.training.modes import Asynchronous, LocalSteps, Mode, Synchronous
from taskmesh.training.robust import Aggregation, Mean
from taskmesh.training.rollback import OnDivergence
from taskmesh.training.setup import Reduce
from taskmesh.training.step.learner import OptimizerMaker, ScheduleMaker
from taskmesh.training.validation import Validate


def check(
    mode: Mode,
    compression: Compression,
    downlink: Compression | None,
    aggregation: Aggregation,
    execution: Execution,
    optimizer: OptimizerMaker,
    schedule: ScheduleMaker | None,
    shards: int,
    group: int,
    *,
    deterministic: bool,
    reduce: Reduce,
) -> None:
    """See that a run's choices go together.

    Raises:
        ConfigurationError: they do not; the message says which and why.
    """
    if group < 1:
        raise ConfigurationError(f"group is {group}; it must be at least 1")
    synchronous = mode if isinstance(mode, Synchronous) else Synchronous()
    needed = synchronous.needed(shards)
    aggregation.check(needed)
    if needed < synchronous.quorum:
        raise ConfigurationError(f"a quorum of {synchronous.quorum} of {shards} shards cannot be")
    for what, why, holds in (
        (
            f"aggregation {aggregation.name} and compression {compression.name}",
            "most coordinates of a sparse gradient are zero, and so would be what is in their middle",
            not isinstance(aggregation, Mean) and isinstance(compression, TopK | DGC),
        ),
        (
            f"local steps and compression {compression.name}",
            "its momentum is that of gradients; what local steps send are changes of parameters",
            isinstance(mode, LocalSteps) and isinstance(compression, DGC),
        ),
        (
            f"downlink {'' if downlink is None else downlink.name}",
            "its momentum is that of one shard's gradients; what goes down is the mean of all",
            isinstance(downlink, DGC),
        ),
        (
            f"backups and compression {compression.name}",
            "only the worker that holds what a shard's compression remembers can compute the shard",
            synchronous.backups > 0 and _remembers(compression),
        ),
        (
            f"a quorum of {needed} of {shards} shards and compression {compression.name}",
            "only the worker that holds what a shard's compression remembers can compute the shard, so what is late "
            "once would be late for ever",
            needed < shards and _remembers(compression),
        ),
        (
            f"a quorum of {needed} of {shards} shards and deterministic=True",
            "which shards are late depends on chance (what came of it can be formed again from the ledger)",
            needed < shards and deterministic,
        ),
        (
            f"asynchronous steps and aggregation {aggregation.name}",
            "each step is of one shard alone",
            isinstance(mode, Asynchronous) and not isinstance(aggregation, Mean),
        ),
        (
            f"asynchronous steps and compression {compression.name}",
            "only the worker that holds what a shard's compression remembers can compute the shard, and nothing "
            "asynchronous should wait for one worker",
            isinstance(mode, Asynchronous) and _remembers(compression),
        ),
        (
            f"asynchronous steps and downlink {'' if downlink is None else downlink.name}",
            "workers that step from each version to the next do not come back to the older one that a shard is of",
            isinstance(mode, Asynchronous) and downlink is not None,
        ),
        (
            "asynchronous steps and reduce='workers'",
            "each step is of one shard alone, and there is nothing to reduce",
            isinstance(mode, Asynchronous) and reduce == "workers",
        ),
        (
            "asynchronous steps and deterministic=True",
            "in which order shards come depends on chance (what came of it can be formed again from the ledger)",
            isinstance(mode, Asynchronous) and deterministic,
        ),
        (
            "local steps and ReduceLROnPlateau",
            "each round makes the inner schedule anew and winds it forward, without the losses that it went by",
            isinstance(mode, LocalSteps) and _goes_by_losses(optimizer, schedule),
        ),
        (
            "local steps and precision fp16",
            "the steps between two rounds have no scaler; bf16 needs none",
            isinstance(mode, LocalSteps) and execution.precision == "fp16",
        ),
        (
            "local steps and groups",
            "a group takes each step together; ranks that step on their own are workers of their own",
            isinstance(mode, LocalSteps) and group > 1,
        ),
        (
            "precision fp16 and a model that ranks share (parallel)",
            "its gradient is not scaled back; bf16 needs no scaler",
            execution.parallel is not None and execution.precision == "fp16",
        ),
        (
            f"{'torch.compile' if execution.compile else f'device {execution.device!r}'} and deterministic=True",
            "it may give other bits elsewhere",
            deterministic and (execution.compile or execution.device != "cpu"),
        ),
    ):
        if holds:
            raise ConfigurationError(f"{what} do not go together: {why}")
    if isinstance(compression, DGC) and compression.momentum > 0 and _has_momentum(optimizer):
        raise ConfigurationError(
            f"compression {compression.name} and an optimizer with momentum do not go together: DGC brings its own, "
            "and the two would multiply; give DGC(momentum=0), or an optimizer without"
        )


def _remembers(compression: Compression) -> bool:
    """Whether a shard's compression goes on from what it has left out before."""
    return bool(compression.memory(Bucket(0, 1)))


def check_metrics(validate: Validate | None, checkpoint: Every, divergence: OnDivergence) -> None:
    """See that there is every metric that a run is told to go by.

    Raises:
        ConfigurationError: one is never measured, or is said to be best both ways.
    """
    if divergence.metric_drop is not None and validate is None:
        raise ConfigurationError(
            f"{divergence}: a metric_drop needs a metric: give the Trainer validate=Validate(...)"
        )
    metrics = {"loss": "lowest", **({} if validate is None else {validate.name: validate.best_is})}
    if checkpoint.best is not None and metrics.get(checkpoint.best) != checkpoint.best_is:
        known = ", ".join(f"{name} (best is the {best_is})" for name, best_is in metrics.items())
        raise ConfigurationError(
            f"best={checkpoint.best!r}, best_is={checkpoint.best_is!r}: the run measures {known}"
        )


def _goes_by_losses(make: OptimizerMaker, schedule: ScheduleMaker | None) -> bool:
    """Whether a schedule depends on what losses there were."""
    parameter = nn.Parameter(torch.zeros(1))
    return schedule is not None and isinstance(schedule(make([parameter])), ReduceLROnPlateau)


def _has_momentum(make: Callable[..., Optimizer]) -> bool:
    """Whether an optimizer of that kind remembers past gradients' direction."""
    groups = make([nn.Parameter(torch.zeros(1))]).param_groups
    return any(group.get("momentum") or group.get("betas", (0,))[0] for group in groups)
