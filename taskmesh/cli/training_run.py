"""Commands about one training run: which run is meant, and something done with it while its Mesh is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from taskmesh.app.mesh import Mesh
from taskmesh.checkpoints.store import VersionStore
from taskmesh.cli.loading import load, load_mesh
from taskmesh.errors import ConfigurationError
from taskmesh.keys import RunKeys, check_name

R = TypeVar("R")
App = Annotated[
    str,
    typer.Argument(
        metavar="APP", help="The Mesh, or a Trainer of it, as module:attribute (for example app:trainer)."
    ),
]
Run = Annotated[
    str | None, typer.Option("--run", "-r", help="The run's name. Default: the Trainer's, or the only one.")
]


class TrainingRun(NamedTuple):
    """The run that a command is about."""

    mesh: Mesh
    name: str

    @property
    def store(self) -> VersionStore:
        client = self.mesh.client
        return VersionStore(client.caller, client.bulk, RunKeys(self.mesh.name, self.name))

    def trainer(self, why: str) -> Any:
        """The app's Trainer of it.

        Raises:
            ConfigurationError: it has none; ``why`` says what for it is needed.
        """
        trainer: Any = self.mesh.runs.get(self.name)
        if not hasattr(trainer, "rollback"):
            raise ConfigurationError(f"the app has no Trainer of run {self.name!r}: {why}")
        return trainer


def do(app: str, run: str | None, work: Callable[[TrainingRun], Awaitable[R]]) -> R:
    """Something with the run that is meant, while its Mesh is connected."""
    found = _find(app, run)
    if len(found) != 1:
        known = f"has {', '.join(each.name for each in found)}" if found else "has no run"
        raise ConfigurationError(f"{app} {known}: say which run with --run")
    return _with(found, work)[0]


def do_all(app: str, run: str | None, work: Callable[[TrainingRun], Awaitable[R]]) -> list[R]:
    """Something with every run that may be meant."""
    return _with(_find(app, run), work)


def _with(runs: Sequence[TrainingRun], work: Callable[[TrainingRun], Awaitable[R]]) -> list[R]:
    async def connected() -> list[R]:
        if not runs:
            return []
        async with runs[0].mesh:
            return [await work(run) for run in runs]

    return asyncio.run(connected())


def _find(target: str, run: str | None) -> list[TrainingRun]:
    """The named run, or all of the app."""
    found = load(target)
    mesh, name = getattr(found, "mesh", None), getattr(found, "name", None)
    if isinstance(mesh, Mesh) and isinstance(name, str):
        return [TrainingRun(mesh, check_name("run", run or name))]
    mesh = load_mesh(target)
    names = sorted(mesh.runs) if run is None else [check_name("run", run)]
    return [TrainingRun(mesh, name) for name in names]
