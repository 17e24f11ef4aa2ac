"""Where a scorer takes its model from: a version of a training run."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import nn

from taskmesh.app.mesh import Mesh
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import CheckpointError, ConfigurationError
from taskmesh.keys import RunKeys, check_name
from taskmesh.tensors import FlatModel, drawing

log = logging.getLogger("taskmesh.scoring")


class Run(Protocol):
    """A training run, as far as its model is wanted: ``taskmesh.training.Trainer`` is one."""

    @property
    def name(self) -> str: ...

    @property
    def model(self) -> Callable[[], nn.Module]: ...


class LoadedModel(NamedTuple):
    """A model in evaluation mode, and the version that its parameters are."""

    version: int
    model: nn.Module


class RunModel:
    """The model of a run in this process: loaded when it is first wanted, replaced when it is told to.

    What is being scored while a new version is loaded is scored by the old one.
    """

    def __init__(
        self, run: str, build: Callable[[], nn.Module], version: int | None, refresh_every: float | None
    ) -> None:
        self.run = check_name("run", run)
        self._build = build
        self._wanted = version
        self._refresh_every = refresh_every
        self._loaded: LoadedModel | None = None
        self._looked = 0.0
        self._loading = asyncio.Lock()

    async def get(self, mesh: Mesh) -> LoadedModel:
        """The model, loaded.

        Raises:
            CheckpointError: the run has no such version, or it is damaged.
        """
        loaded = self._loaded
        if loaded is None:
            async with self._loading:
                return self._loaded or await self._load(mesh)
        if self._refresh_every is not None and time.monotonic() - self._looked > self._refresh_every:
            self._looked = time.monotonic()
            try:
                return await self.refresh(mesh, self._wanted)
            except CheckpointError as error:
                log.warning("the model of run %s stays at version %d: %s", self.run, loaded.version, error)
        return loaded

    async def refresh(self, mesh: Mesh, version: int | None = None) -> LoadedModel:
        """Take another version: the one named, or the newest.

        Raises:
            CheckpointError: there is no such version, or it is damaged; the model stays as it was.
        """
        async with self._loading:
            before, self._wanted = self._wanted, version
            try:
                return await self._load(mesh)
            except CheckpointError:
                self._wanted = before
                raise

    async def _load(self, mesh: Mesh) -> LoadedModel:
        client = mesh.client
        store = VersionStore(client.caller, client.bulk, RunKeys(mesh.name, self.run))
        if self._loaded is not None and (await store.find(self._wanted)).version == self._loaded.version:
            return self._loaded
        manifest, parameters = await store.load_parameters(self._wanted)
        model = await asyncio.to_thread(self._fill, manifest, parameters)
        self._loaded, self._looked = LoadedModel(manifest.version, model), time.monotonic()
        return self._loaded

    def _fill(self, manifest: Manifest, parameters: memoryview) -> nn.Module:
        with drawing():  # not while a shard of a training run is computed in this process
            flat = FlatModel(self._build())
        if flat.layout.digest != manifest.layout:
            raise CheckpointError(f"version {manifest.version} of run {self.run!r} is another model's")
        flat.load(parameters)
        return flat.model.eval().requires_grad_(False)


def from_run(
    run: Run | str,
    *,
    build: Callable[[], nn.Module] | None = None,
    version: int | None = None,
    refresh_every: float | None = None,
) -> RunModel:
    """A training run's model.

    Args:
        run: the Trainer, or the run's name; with a name, ``build`` makes the model.
        version: a kept version; None for the newest.
        refresh_every: look for a newer version at most every so many seconds; None only when told.

    Raises:
        ConfigurationError: nothing says how the model is made.
    """
    if isinstance(run, str):
        if build is None:
            raise ConfigurationError(
                f"from_run({run!r}): say how the model is made (build=...), or give the Trainer"
            )
        return RunModel(run, build, version, refresh_every)
    return RunModel(run.name, build or run.model, version, refresh_every)
