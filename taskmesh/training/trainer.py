"""The public face of training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from torch import nn

from taskmesh.app.mesh import Mesh
from taskmesh.checkpoints.lease import Lease
from taskmesh.checkpoints.mirror import Mirror
from taskmesh.checkpoints.retention import Every
from taskmesh.errors import BrokerError, CheckpointError, ConfigurationError, TaskmeshError, TrainingError
from taskmesh.events import Committed, WaitingForLease
from taskmesh.keys import RunKeys, check_name
from taskmesh.messages import Priority
from taskmesh.tasks import Retry, TaskOptions
from taskmesh.training.buckets import cut
from taskmesh.training.compatibility import check, check_metrics
from taskmesh.training.compression import Compression, Int8
from taskmesh.training.data import Dataset, Sampler
from taskmesh.training.execution import Execution
from taskmesh.training.fingerprint import fingerprint
from taskmesh.training.host import HostMemory, host_name
from taskmesh.training.master.attempts import Dispatch
from taskmesh.training.master.collect import Collector
from taskmesh.training.master.commit import Committer
from taskmesh.training.master.keeper import Keeper
from taskmesh.training.master.lead import Finished, Master
from taskmesh.training.master.roster import Roster
from taskmesh.training.master.validator import Validator
from taskmesh.training.memory import fresh, size_of
from taskmesh.training.modes import LocalSteps, Mode, Synchronous
from taskmesh.training.orders import ShardFailed
from taskmesh.training.past.history import Formed
from taskmesh.training.reader import RunReader
from taskmesh.training.robust import Aggregation, Mean
from taskmesh.training.rollback import OnDivergence
from taskmesh.training.setup import Reduce, RunSetup
from taskmesh.training.step.learner import Learner, OptimizerMaker, ScheduleMaker
from taskmesh.training.validation import Validate
from taskmesh.training.worker.group import Member
from taskmesh.training.worker.local import Local, outer_optimizer
from taskmesh.training.worker.ranks import Ranks
from taskmesh.training.worker.reduce import Reducer
from taskmesh.training.worker.replica import LossFunction, Recipe
from taskmesh.training.worker.shard import Shards

R = TypeVar("R")
RESULT_TTL = 60.0
IN_HAND = (
    2  # shards in a process: one is computed at a time, and what the next one needs is fetched meanwhile
)
INFERENCE_RETRY = Retry(attempts=3, delay=0.05, on=(BrokerError,))


class Trainer(RunReader):
    """A training run over a Mesh: synchronous, data-parallel, the same bits with any number of workers.

    To be constructed at the top level of a module that the workers import too: it registers the run's tasks
    (``<name>.gradient``, ``<name>.reduce``, ``<name>.memory`` and ``<name>.infer``, on the queue ``<name>``) with the
    Mesh.

    Args:
        mesh: where it runs.
        name: the run's name; one run of that name is in the Mesh, and a later ``run`` goes on with it.
        model: makes the model. Every process makes its own, from the same seed.
        loss: from the model and what ``data.fetch`` returned to the losses of the samples (or tokens), unreduced,
            or to (sum, count). Randomness comes from the default generators of torch, numpy and Python, which are
            seeded for each shard.
        data: what is learnt from; in every process.
        optimizer: makes the optimizer of the parameters it is given, in the master.
        schedule: makes a learning-rate schedule, stepped once a step (ReduceLROnPlateau with the step's loss).
        shards: logical shards of each step, fixed whatever the number of workers; at least 8 a worker let their
            speeds differ.
        batch_size: samples of each step.
        compression: of gradients on their way to the master.
        downlink: of the mean gradient on its way to the workers, who then step by it as the master does; None to send
            them the parameters.
        checkpoint: which versions are kept.
        rollback: what counts as divergence, and what follows.
        seed: of the model's first parameters, the data's order, dropout and rounding.
        threads: torch's intra-op threads for a shard; 1 gives the same bits whatever the machine's cores.
        mode: how the workers' contributions become steps; by default each step is made of all its shards. Of an
            asynchronous run each shard is a step.
        deterministic: workers whose torch build, processor or settings would give other bits than the master's get no
            shards. False lets them differ.
        execution: precision, micro-batches, device and the like.
        aggregation: how the gradients of a step's shards become one.
        group: ranks of each worker, started by torchrun (``taskmesh worker --group``): they compute a shard together,
            with other bits than one process does. A deterministic run has no other workers.
        clip: the largest norm of a step's mean gradient (with local steps: of each of theirs); a longer one is scaled
            down to it. None for any; ``math.inf`` only has it measured.
        validate: a metric that the master takes of some versions: for ``Every(best=...)``,
            ``OnDivergence(metric_drop=...)`` and whoever watches.
        reduce: who makes one gradient of those of the shards: "master"; "workers", a range of it each; or whoever is
            sooner done with it by the bytes that each link carries, which is the master where there is one server. The
            bits are the same.

    Raises:
        ConfigurationError: something of it cannot work, or the name is taken.
    """

    def __init__(
        self,
        mesh: Mesh,
        name: str,
        *,
        model: Callable[[], nn.Module],
        loss: LossFunction,
        data: Dataset[Any],
        optimizer: OptimizerMaker,
        schedule: ScheduleMaker | None = None,
        shards: int = 8,
        batch_size: int = 256,
        compression: Compression | None = None,
        downlink: Compression | None = None,
        checkpoint: Every | None = None,
        rollback: OnDivergence | None = None,
        seed: int = 0,
        threads: int = 1,
        mode: Mode = Synchronous(),  # noqa: B008 (it is frozen)
        deterministic: bool = True,
        execution: Execution = Execution(),  # noqa: B008 (it is frozen)
        aggregation: Aggregation = Mean(),  # noqa: B008 (likewise)
        group: int = 1,
        validate: Validate | None = None,
        clip: float | None = None,
        reduce: Reduce = "auto",
    ) -> None:
        self.mesh = mesh
        self.name = check_name("run", name)
        self.model = model
        if threads < 1:
            raise ConfigurationError(f"threads is {threads}; it must be at least 1")
        compression = compression or Int8()
        check(
            mode,
            compression,
            downlink,
            aggregation,
            execution,
            optimizer,
            schedule,
            shards,
            group,
            deterministic=deterministic,
            reduce=reduce,
        )
        self._validate = validate
        checkpoint, rollback = checkpoint or Every(), rollback or OnDivergence()
        check_metrics(validate, checkpoint, rollback)
        self._setup = RunSetup(
            RunKeys(mesh.name, name),
            seed,
            shards,
            batch_size,
            compression,
            checkpoint,
            rollback,
            len(data),
            mesh.settings.liveness_ttl,
            mode,
            fingerprint(threads, group) if deterministic else "",
            execution.name,
            aggregation,
            downlink,
            clip,
            reduce=reduce,
        )
        self._sampler = Sampler(len(data), batch_size, seed)
        self._threads = threads
        local = None
        self._optimizer, self._schedule, self._clip = optimizer, schedule, clip
        if isinstance(mode, LocalSteps):
            local = Local(optimizer, schedule, mode.steps, clip)
            self._optimizer, self._schedule, self._clip = outer_optimizer(mode), None, None
        recipe = Recipe(
            name,
            model,
            loss,
            data,
            self._setup.compression,
            seed,
            threads,
            self._setup.agreement,
            fingerprint(threads),
            execution,
            not deterministic,
            local,
            None if downlink is None else self._new_learner,
        )
        self._recipe = recipe
        self._group = group
        self._shards = Shards(mesh, self._setup.keys, recipe)
        options = TaskOptions(queue=name, result_ttl=RESULT_TTL, raises=(ShardFailed,), in_hand=IN_HAND)
        self._gradient = mesh.add_task(self._shards.gradient, f"{name}.gradient", options)
        options = TaskOptions(
            queue=name,
            result_ttl=RESULT_TTL,
            retry=INFERENCE_RETRY,
            raises=(CheckpointError,),
            in_hand=IN_HAND,
        )
        self._infer = mesh.add_task(self._shards.infer, f"{name}.infer", options)
        options = TaskOptions(queue=name, result_ttl=RESULT_TTL, priority=Priority.HIGH)
        self._reduce = mesh.add_task(Reducer(mesh, self._setup).reduce, f"{name}.reduce", options)
        self._memory = mesh.add_task(self._shards.write_memory, f"{name}.memory", options)
        mesh.registry.leaving.append(self._shards.leave)
        self._master: Master | None = None
        mesh.runs[name] = self

    def __repr__(self) -> str:
        return f"<Trainer of run {self.name!r}>"

    async def run(self, *, steps: int, on_commit: Callable[[Committed], None] | None = None) -> Finished:
        """Be the run's master until it has seen ``steps`` updates in all.

        It waits for the lease where another process has it, goes on from the newest checkpoint where there is one,
        and keeps the last version. It may be started again after any crash, anywhere.

        Args:
            on_commit: called after each step, from the event loop.

        Raises:
            TrainingError: the run cannot go on: a shard's handler fails, it diverges again and again, or it is
                deterministic and was begun with another torch build, processor or number of threads.
            LeadershipLost: another master has taken over.
            CheckpointError: there are checkpoints, and none is whole or fits.
            BrokerError: the server is away for longer than ``MeshSettings.retry_for``, or full.
        """

        async def work(master: Master) -> Finished:
            return await master.run(steps, on_commit)

        return await self._lead(work, None)

    async def rollback(self, *, to: int) -> int:
        """Make a kept version current, as a new version, whose number is returned.

        A run that is under way in this process goes on from there.

        Raises:
            CheckpointError: the version is not kept (any more), or is damaged.
            TrainingError: another process leads the run; or the run under way ended first.
        """
        if self._master is not None:
            return await self._master.request_rollback(to)

        async def work(master: Master) -> int:
            await master.resume()
            return await master.roll_back_to(to)

        return await self._lead(work, 2 * self._setup.lease_ttl)

    async def form(
        self,
        version: int | None = None,
        *,
        without: str,
        since: int | None = None,
        commit: bool = False,
    ) -> Formed:
        """Form a version again without what one worker contributed to it.

        Each step is then the mean over the other shards; one that is all the worker's is not taken. The random numbers,
        batches and schedule are those of the run.

        Args:
            version: by default the current one.
            without: the worker, by its name in the ledger.
            since: the checkpoint from which its contributions are left out; by default the oldest from which that can
                be told.
            commit: make it the current version, as a new one and a checkpoint, while nobody trains.

        Raises:
            ConfigurationError: the worker contributed nothing.
            CheckpointError, TrainingError: as ``replay``; or, to commit it, somebody leads the run.
        """
        if version is None:
            version = (await self.store.find()).version
        formed, point = await (await self._history()).form(version, without, since)
        if not commit:
            return formed
        if self._master is not None:
            raise TrainingError(f"run {self.name!r} is under way: commit when it has ended")

        async def work(master: Master) -> int:
            await master.resume()
            return await master.adopt(point, without, version, formed.since)

        return formed._replace(version=await self._lead(work, 2 * self._setup.lease_ttl))

    def join(self, ranks: Ranks) -> Member:
        """Compute this process's shards together with other ranks: what ``taskmesh worker --group`` does.

        Raises:
            ConfigurationError: the run takes local steps.
        """
        return self._shards.join(ranks)

    async def delete(self, *, mirror: bool = False) -> int:
        """Remove the run: its versions, ledger and keys. Returns how many checkpoints it had.

        A later ``run`` begins anew; where the mirror stays, it goes on from there.

        Args:
            mirror: remove what is on its mirror too.

        Raises:
            TrainingError: somebody leads it.
            CheckpointError: the mirror could not be emptied; in Redis the run is gone.
        """
        if self._master is not None:
            raise TrainingError(f"run {self.name!r} is under way: it can be deleted when it has ended")
        lease = Lease(self.mesh.client.caller, self._setup.keys, self._setup.lease_ttl)
        token = await lease.acquire(2 * self._setup.lease_ttl)
        try:
            removed = await self.store.delete(token)
            place = self._setup.checkpoint.mirror
            if mirror and place is not None:
                await asyncio.to_thread(Mirror(place, self.mesh.name, self.name).prune, ())
        finally:
            with contextlib.suppress(TaskmeshError):
                await lease.release()
        return removed

    async def _lead(self, work: Callable[[Master], Awaitable[R]], timeout: float | None) -> R:
        """Do something as the run's master, under its lease."""
        lease = Lease(self.mesh.client.caller, self._setup.keys, self._setup.lease_ttl)
        # Whoever waits for the lease is ready when it comes: the first optimizer of a process takes a second.
        learner, setup = await self._make_learner(), await self._identified()
        token = await lease.acquire(timeout, self._tell_of_leader)
        holding = asyncio.create_task(lease.hold(), name="taskmesh lease")
        working = asyncio.create_task(
            self._work(work, setup, learner, token), name=f"taskmesh run {self.name}"
        )
        try:
            await asyncio.wait({holding, working}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                working.cancel()
                await asyncio.gather(working, return_exceptions=True)
                await holding
            return await working
        finally:
            if self._master is not None:
                self._master.close()
            self._master = None
            working.cancel()  # it completes the checkpoint on its way, and holds the lease meanwhile
            await asyncio.gather(working, return_exceptions=True)
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)
            with contextlib.suppress(TaskmeshError):
                await lease.release()

    def _tell_of_leader(self, leader: str) -> None:
        self.mesh.observers.emit(WaitingForLease(self.name, leader))

    async def _work(
        self, work: Callable[[Master], Awaitable[R]], setup: RunSetup, learner: Learner, token: int
    ) -> R:
        store = self.store
        layout = learner.flat.layout
        compression = setup.compression
        state = fresh(compression, cut(layout, whole=compression.takes_whole_parameters))
        observers = self.mesh.observers
        roster = Roster(setup, self.mesh.client, observers, remembers=size_of(state) > 0)
        keeper = Keeper(setup, roster, self._memory, token, size_of(state))
        committer = Committer(setup, store, learner, token, observers, keeper)
        dispatch = Dispatch(
            setup, self.mesh.client, observers, self._gradient, roster, keeper, committer.republish
        )
        collector = Collector(dispatch, self._reduce, layout)
        host = HostMemory(host_name(self.mesh.settings.url, setup.keys))
        validator = None
        if self._validate is not None:
            validator = Validator(setup, self._validate, self.model, self._threads, observers)
        self._master = Master(setup, self._sampler, learner, committer, collector, observers, host, validator)
        listening = asyncio.create_task(collector.listen(), name="taskmesh notes")
        try:
            return await work(self._master)
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            await committer.close()
