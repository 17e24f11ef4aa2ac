"""What checkpoints cost the run that they are of. As a program it is the master of such a run."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import redis
import torch

from benchmarks.training.fleet import Fleet
from benchmarks.training.lines import Program, tell
from benchmarks.training.plan import NEVER, Plan
from benchmarks.training.servers import servers
from taskmesh.checkpoints.lease import Lease
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.store import Commit
from taskmesh.events import Checkpointed, Committed, Event, Observers
from taskmesh.training.master.keeper import Keeper
from taskmesh.training.master.roster import Roster
from taskmesh.training.master.saver import Saver
from taskmesh.training.step.aggregate import Update
from taskmesh.training.step.learner import Learner

PARAMETERS = 10_000_000
WORKERS = 2
ALONE = 5  # checkpoints that are made without a run beside them, for their processor time


class Watched(Fleet):
    """A fleet whose master tells of its checkpoints."""

    def watched_master(self) -> Program:
        return self._start("master", [sys.executable, "-m", __name__], {})


class Save(NamedTuple):
    """One checkpoint of a run.

    Attributes:
        blocked: seconds in which it may have held the run up: waiting for the one before it, and the copy.
        slowed: seconds by which the steps beside it took longer than the others, all in all.
    """

    seconds: float
    blocked: float
    slowed: float
    size_bytes: int


def measure_checkpoint_blocking(
    repeats: int = 1, every: int = 50, checkpoints: int = 3, parameters: int = PARAMETERS
) -> dict[str, Any]:
    """Medians over the checkpoints of runs of a dense model with Adam on loopback, as shares of ``every`` steps.

    ``checkpoint_blocking_share`` is what a checkpoint itself holds up at most; ``checkpoint_slowing_share`` also has
    what the steps beside it lose to its hashing and writing on these processors; ``checkpoint_cpu_share`` is the
    processor time of master and server for one, by the time of ``every`` steps on one processor.
    """
    plan = Plan(
        work="dense_adam",
        size=parameters,
        shards=WORKERS,
        batch=32 * WORKERS,
        workers=WORKERS,
        steps=every * checkpoints + every // 2,
        checkpoint_every=every,
    )
    saves: list[Save] = []
    steps: list[float] = []
    cpu: list[float] = []
    for _ in range(repeats):
        found, lasted, used = _run(plan)
        saves += found
        steps.append(lasted)
        cpu.append(used)
    step = statistics.median(steps)
    window = every * step
    return {
        "checkpoint_blocking_share": statistics.median(save.blocked for save in saves) / window,
        "checkpoint_slowing_share": statistics.median(save.slowed for save in saves) / window,
        "checkpoint_cpu_share": statistics.median(cpu) / window,
        "checkpoint_cpu_s": statistics.median(cpu),
        "checkpoint_blocked_s": statistics.median(save.blocked for save in saves),
        "checkpoint_s": statistics.median(save.seconds for save in saves),
        "checkpoint_bytes": saves[-1].size_bytes,
        "checkpoint_every": every,
        "checkpoint_step_s": step,
    }


def _run(plan: Plan) -> tuple[list[Save], float, float]:
    """The run's checkpoints, the median of its other steps, and the processor time of a checkpoint alone."""
    with servers() as both, Watched(plan, both) as fleet:
        for _ in range(plan.workers):
            fleet.worker()
        master = fleet.watched_master()
        commits: list[float] = []
        told: list[dict[str, Any]] = []
        while "cpu" not in (line := master.next()):
            if "commit" in line:
                commits.append(line["at"])
            elif line.get("checkpoint", 0) % plan.checkpoint_every == 0 < line.get("checkpoint", 0):
                told.append(line)
    lasted = list(itertools.pairwise(commits))
    quiet = [end - begin for begin, end in lasted[5:] if not _is_beside(begin, end, told)]
    usual = statistics.median(quiet)
    saves = [
        Save(
            line["seconds"],
            line["waited"] + line["copy"],
            sum(end - begin - usual for begin, end in lasted if _is_beside(begin, end, [line])),
            line["size_bytes"],
        )
        for line in told
    ]
    return saves, usual, float(line["cpu"])


def _is_beside(begin: float, end: float, told: Sequence[dict[str, Any]]) -> bool:
    """Whether a checkpoint was on its way during a step."""
    return any(begin < line["at"] and end > line["at"] - line["seconds"] for line in told)


class _Teller:
    """An observer."""

    def on_event(self, event: Event) -> None:
        match event:
            case Committed():
                tell(commit=event.step, at=time.monotonic())
            case Checkpointed():
                tell(
                    checkpoint=event.step,
                    at=time.monotonic(),
                    seconds=event.seconds,
                    waited=event.waited_seconds,
                    copy=event.copy_seconds,
                    size_bytes=event.size_bytes,
                )


async def _main() -> None:
    from benchmarks.training.app import mesh, plan, trainer

    mesh.observers.add(_Teller())
    async with mesh:
        await trainer.run(steps=plan.steps)
        tell(cpu=await _cpu_alone())


async def _cpu_alone() -> float:
    """Processor seconds of master and server for one checkpoint, with nothing beside it.

    The version that it is of changes all values, so that nothing is borrowed from the one before.
    """
    from benchmarks.training.app import mesh, trainer, work

    setup, store = trainer._setup, trainer.store
    learner = Learner(work.model, work.optimizer, None, 0, 1)
    count = learner.flat.layout.parameter_count
    ones = Update(1.0, 1, torch.ones(count).numpy(), torch.empty(0).numpy(), torch.empty(0).long().numpy())
    lease = Lease(mesh.client.caller, setup.keys, 60.0)
    token = await lease.acquire()
    roster = Roster(setup, mesh.client, Observers(), remembers=False)
    keeper = Keeper(setup, roster, trainer._memory, token, 0)
    saver = Saver(setup, store, learner, token, Observers(), keeper)
    newest = await store.find()
    used: list[float] = []
    with redis.Redis.from_url(mesh.settings.url or "") as durable:
        for number in range(1, ALONE + 1):
            learner.apply(ones, number)
            version = newest.version + number
            part = await store.write(version, token, learner.flat.view())
            manifest = Manifest(
                version, version - 1, NEVER, 0, token, False, "", {"parameters": part}, {"loss": 1.0}
            )
            await store.commit(Commit(manifest), token)
            before = _used(durable)
            await saver.begin(manifest, {})
            await saver.wait()
            used.append(_used(durable) - before)
            await store.forget(part)
    await lease.release()
    return statistics.median(used)


def _used(server: redis.Redis) -> float:
    found = server.info("cpu")
    return time.process_time() + float(found["used_cpu_sys"]) + float(found["used_cpu_user"])


if __name__ == "__main__":
    asyncio.run(_main())
