"""A run as anybody may look at it: its models, versions and past. It takes no lease."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from taskmesh.app.mesh import Mesh
from taskmesh.app.task import Task
from taskmesh.broker.liveness import live_workers
from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import BrokerError, CheckpointError, ConfigurationError, TrainingError
from taskmesh.monitoring.status import RunStatus
from taskmesh.tensors import FlatModel, drawing
from taskmesh.training.compute import compute
from taskmesh.training.data import Sampler
from taskmesh.training.identity import identify
from taskmesh.training.ledger import LedgerEntry, decode_entry
from taskmesh.training.past.history import History, Replayed, Turned
from taskmesh.training.setup import RunSetup
from taskmesh.training.step.learner import Learner, OptimizerMaker, ScheduleMaker
from taskmesh.training.worker.replica import Recipe

log = logging.getLogger("taskmesh.training")
INFERENCE_ROWS = 256
PATIENCE = 5.0


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """The share of rows whose largest output is the target's; shapes (rows, classes) and (rows,)."""
    return float((outputs.argmax(dim=-1) == targets).float().mean())


class RunReader:
    """Reads one run. Whoever makes it sets its attributes.

    Attributes:
        model: makes the run's model.
    """

    mesh: Mesh
    name: str
    model: Callable[[], nn.Module]
    _setup: RunSetup
    _recipe: Recipe
    _infer: Task[[Part, str, Tensor], Tensor]
    _optimizer: OptimizerMaker
    _schedule: ScheduleMaker | None
    _threads: int
    _group: int
    _clip: float | None

    @property
    def store(self) -> VersionStore:
        """The run's versions; the Mesh must be entered."""
        client = self.mesh.client
        return VersionStore(client.caller, client.bulk, self._setup.keys)

    async def load(self, version: int | None = None) -> nn.Module:
        """The model with a version's parameters (by default the current one's), in this process.

        Raises:
            CheckpointError: there is no such version, or it is damaged.
        """
        manifest, parameters = await self.store.load_parameters(version)
        return await compute(self._build, manifest, parameters)

    async def predict(
        self, rows: Tensor, *, version: int | None = None, task_rows: int = INFERENCE_ROWS
    ) -> Tensor:
        """The model's outputs for rows of inputs, computed by the workers, in evaluation mode.

        It waits for workers where there are none, and the log says so every few seconds.

        Args:
            rows: inputs; shape (rows, ...).
            task_rows: rows of one task.

        Raises:
            CheckpointError: there is no such version.
            TaskFailed: a worker could not compute it.
        """
        store = self.store
        manifest = await store.find(version)
        if "update" in manifest.parts:
            manifest = (await store.kept())[-1]  # its parameters do not travel
        try:
            return await self._predict(manifest, rows, task_rows)
        except CheckpointError:
            # A version that is not kept gives way to the next one of a run under way.
            kept = [] if manifest.kept else await store.kept()
            if not kept:
                raise
            return await self._predict(kept[-1], rows, task_rows)

    async def _predict(self, manifest: Manifest, rows: Tensor, task_rows: int) -> Tensor:
        part = manifest.parts["parameters"]
        calls = [self._infer.bind(part, manifest.layout, piece) for piece in torch.split(rows, task_rows)]
        handles = await self._infer.submit_many(calls)
        waiting = asyncio.gather(*(handle.result() for handle in handles))
        try:
            while not (await asyncio.wait({waiting}, timeout=PATIENCE))[0]:
                await self._tell_what_is_waited_for(len(handles))
            outputs: list[Tensor] = await waiting
        finally:
            waiting.cancel()
        return torch.cat(outputs)

    async def _tell_what_is_waited_for(self, tasks: int) -> None:
        try:
            workers = await live_workers(
                self.mesh.client.partition(self.name), self.mesh.settings.liveness_ttl
            )
        except BrokerError as error:
            who = f"the server does not say who ({error})"
        else:
            who = f"{len(workers)} workers alive:" if workers else "no worker"
        log.warning(
            "run %s: waiting for %d tasks of inference; %s serves queue %r", self.name, tasks, who, self.name
        )

    async def evaluate(
        self,
        rows: Tensor,
        targets: Tensor,
        *,
        measure: Callable[[Tensor, Tensor], float] = accuracy,
        version: int | None = None,
    ) -> float:
        """How good a version is on held-out rows, computed by the workers.

        Args:
            measure: from outputs and targets to a number.

        Raises:
            as ``predict``.
        """
        return measure(await self.predict(rows, version=version), targets)

    async def versions(self) -> list[Manifest]:
        """The checkpoints, oldest first."""
        return await self.store.kept()

    async def ledger(self, count: int = 10_000) -> list[LedgerEntry]:
        """What formed the newest ``count`` versions, oldest first."""
        return [decode_entry(entry) for entry in await self.store.ledger(count)]

    async def replay(self, from_version: int | None = None, to_version: int | None = None) -> list[Replayed]:
        """Form versions again in this process, from a checkpoint and the ledger, and compare them with the run's.

        The bits are the run's where this process is like its workers (torch build, numpy, CPU capability, threads).

        Args:
            from_version: a checkpoint that led to the last one; by default the oldest from which it can be told.
            to_version: by default the current one.

        Returns:
            Each version on the way, oldest first; what was rolled back is not on it.

        Raises:
            CheckpointError: a checkpoint or an entry of the ledger is missing or damaged, or does not lead there.
            TrainingError: the run was begun with other settings.
        """
        return await (await self._history()).replay(from_version, to_version)

    async def bisect(
        self, is_bad: Callable[[nn.Module], bool], *, good: int | None = None, bad: int | None = None
    ) -> Turned:
        """Find the version at which a run turned bad, by judging as few of its models as can be.

        Args:
            is_bad: judges a model in evaluation mode; false up to some version, and true from then on.
            good: a checkpoint that is not bad; by default the oldest from which the bad one can be formed again.
            bad: by default the current version.

        Raises:
            ConfigurationError: the good one is bad already, or the bad one is not.
            CheckpointError, TrainingError: as ``replay``.
        """
        return await (await self._history()).bisect(is_bad, good, bad)

    async def indices(self, batch: int) -> Sequence[int]:
        """The sample indices of a batch, by its number in the ledger."""
        return Sampler(self._setup.samples, self._setup.batch_size, self._setup.seed).batch(batch)

    async def status(self) -> RunStatus | None:
        """How the run stands, by its last commit; None before the first."""
        current = await self.store.current()
        if current is None:
            return None
        return RunStatus(self.name, current.version, current.step, current.metrics.get("loss"))

    def _build(self, manifest: Manifest, parameters: memoryview) -> nn.Module:
        flat = self._flat_model()
        if flat.layout.digest != manifest.layout:
            raise ConfigurationError(f"version {manifest.version} of run {self.name!r} is another model's")
        flat.load(parameters)
        return flat.model

    def _fill(self, parameters: memoryview) -> nn.Module:
        flat = self._flat_model()
        flat.load(parameters)
        return flat.model

    def _flat_model(self) -> FlatModel:
        with drawing():
            return FlatModel(self.model())

    async def _identified(self) -> RunSetup:
        """The setup, with what tells the data from others."""
        data = await compute(identify, self._recipe.data, self._setup.seed)
        return replace(self._setup, data=data)

    async def _history(self) -> History:
        if self._group > 1:
            raise TrainingError(
                f"run {self.name!r} is computed by groups of {self._group} ranks: one process gives other bits, and "
                "cannot form its versions again"
            )
        return History(
            await self._identified(), self._recipe, self.store, await self._make_learner(), self._fill
        )

    async def _make_learner(self) -> Learner:
        return await compute(self._new_learner)

    def _new_learner(self) -> Learner:
        setup = self._setup
        return Learner(
            self.model,
            self._optimizer,
            self._schedule,
            setup.seed,
            self._threads,
            setup.downlink,
            self._clip,
        )
