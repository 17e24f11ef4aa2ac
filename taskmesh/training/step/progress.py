"""Where a run stands: what a checkpoint holds of it beside the learner, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

from taskmesh.checkpoints.manifest import Manifest
from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.training.compute import compute
from taskmesh.training.data import Sampler
from taskmesh.training.memory import State
from taskmesh.training.plan import Owed, Plan, next_batch
from taskmesh.training.rollback import LossHistory
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.learner import Learner
from taskmesh.training.step.snapshot import read_state
from taskmesh.training.validation import MetricHistory


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands.

    Attributes:
        step: updates that the parameters have seen.
        drawn: batches that were drawn, skipped ones included: the number of the next one.
        skipped: batches that are left out.
        owed: shards of drawn batches that have not entered a version, and will.
        validation: what was measured of it.
    """

    step: int = 0
    drawn: int = 0
    skipped: tuple[int, ...] = ()
    losses: LossHistory = field(default_factory=LossHistory)
    owed: tuple[Owed, ...] = ()

    def after(self, plan: Plan, late: Sequence[int] = ()) -> Progress:
        """Where the run stands once a plan's step is taken, without the shards that are late."""
        missing = [plan.owed(shard) for shard in late]
        left = [each for each in self.owed if each not in plan.extra or each in missing]
        owed = (*left, *(each for each in missing if each not in plan.extra))
        return replace(self, step=plan.step, drawn=plan.drawn, owed=owed)

    def draw(self, sampler: Sampler, shards: int) -> Progress:
        """The same when one more batch is drawn: its shards are owed."""
        batch = next_batch(self.drawn, self.skipped)
        drawn = range(min(shards, len(sampler.batch(batch))))
        return replace(self, drawn=batch + 1, owed=(*self.owed, *(Owed(batch, shard) for shard in drawn)))

    def leave_out(self, batches: Iterable[int]) -> Progress:
        """The same without some batches: they are not drawn any more, and what is owed of them is not either."""
        skipped = {*self.skipped, *batches}
        owed = tuple(each for each in self.owed if each.batch not in skipped)
        return replace(self, skipped=tuple(sorted(skipped)), owed=owed)

    validation: MetricHistory = field(default_factory=MetricHistory)


class Past(NamedTuple):
    """A version: the steps that had led to it, and its parameters."""

    step: int
    parameters: memoryview


class Point(NamedTuple):
    """A replay's state after some version."""

    parameters: memoryview
    state: Mapping[str, Any]
    progress: Progress
    memories: Mapping[int, State]
    past: Mapping[int, Past]


async def restore(
    setup: RunSetup, learner: Learner, manifest: Manifest, parts: Mapping[str, memoryview], samples: int
) -> Progress:
    """Let a learner go back to a checkpoint of its run.

    Raises:
        TrainingError: the run was begun with another seed, shards, batch size or compression, or other data.
        CheckpointError: it is another model's or optimizer's, or damaged.
    """
    if manifest.layout != learner.flat.layout.digest:
        raise CheckpointError(
            f"version {manifest.version} of run {setup.name!r} is another model's: "
            "give the run another name, or the same model"
        )
    state = await asyncio.to_thread(read_state, parts)
    wanted = run_state(setup, Progress(), samples)
    for name in (
        "seed",
        "samples",
        "batch_size",
        "shards",
        "compression",
        "downlink",
        "mode",
        "aggregation",
        "clip",
    ):
        if state.get(name, wanted[name]) != wanted[name]:  # an older release did not note them all
            raise TrainingError(
                f"run {setup.name!r} was begun with {name} {state.get(name)}, not {wanted[name]}: "
                "give the run another name, or the same values"
            )
    _check_data(setup, str(state.get("data", "")))
    await compute(learner.restore, parts["parameters"], state)
    losses = LossHistory.read(state["losses"]["first"], state["losses"]["recent"])
    owed = tuple(Owed(int(batch), int(shard)) for batch, shard in state.get("owed", ()))
    validation = MetricHistory.read(state.get("validation"))
    progress = Progress(manifest.step, manifest.batch, (), losses, owed, validation)
    return progress.leave_out(manifest.skipped)


def _check_data(setup: RunSetup, begun: str) -> None:
    """See that the data are those that the run was begun with, as far as both are known.

    Raises:
        TrainingError: they are others.
    """
    here = setup.data
    if begun and here and begun.split()[0] == here.split()[0] and begun != here:
        raise TrainingError(
            f"run {setup.name!r} was begun with other data of the same length ({begun}, not {here}): give the run "
            "another name, or the same data; data that are the same in other bytes may say so by an `identity`"
        )


def run_state(setup: RunSetup, progress: Progress, samples: int) -> dict[str, Any]:
    return {
        "seed": setup.seed,
        "samples": samples,
        "data": setup.data,
        "batch_size": setup.batch_size,
        "shards": setup.shards,
        "compression": setup.compression.name,
        "downlink": setup.downlink_name,
        "mode": setup.mode_name,
        "aggregation": setup.aggregation.name,
        "clip": setup.clip_name,
        "losses": asdict(progress.losses),
        "owed": [list(each) for each in progress.owed],
        "validation": asdict(progress.validation),
    }
