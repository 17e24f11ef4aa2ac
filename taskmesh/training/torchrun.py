"""A worker made of ranks that torchrun has started: ``torchrun ... -m taskmesh worker app:mesh --group``."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple

from taskmesh.app.mesh import Mesh
from taskmesh.errors import ConfigurationError
from taskmesh.training.compute import compute
from taskmesh.training.trainer import Trainer
from taskmesh.training.worker.group import Member, Pause, Stop, assist, tell
from taskmesh.training.worker.ranks import Ranks

PAUSE = 60.0  # a leader with nothing to do says so this often: well within the others' patience


class Group(NamedTuple):
    """The group, as one of its ranks sees it.

    Attributes:
        members: what this rank computes, by the runs' names.
    """

    ranks: Ranks
    members: Mapping[str, Member]

    @property
    def leads(self) -> bool:
        """Whether this rank serves the queues."""
        return self.ranks.leads

    async def assist(self) -> None:
        """Be one of those that do not serve, until the leader parts."""
        await compute(assist, self.ranks, self.members)
        await compute(self.ranks.leave)

    @contextlib.asynccontextmanager
    async def lead(self) -> AsyncIterator[None]:
        """Be the one that serves; the others end with the block."""
        pausing = asyncio.create_task(self._pause(), name="taskmesh group")
        try:
            yield
        finally:
            pausing.cancel()
            await asyncio.gather(pausing, return_exceptions=True)
            await compute(tell, self.ranks, Stop())
            await compute(self.ranks.leave)

    async def _pause(self) -> None:
        while True:
            await asyncio.sleep(PAUSE)
            await compute(tell, self.ranks, Pause())


async def join(mesh: Mesh) -> Group:
    """Meet the other ranks; the Mesh's runs are computed together from then on.

    Raises:
        ConfigurationError: torchrun has not started this process; or the Mesh has no run that groups compute.
    """
    runs = [run for run in mesh.runs.values() if isinstance(run, Trainer)]
    if not runs:
        raise ConfigurationError(
            f"Mesh {mesh.name!r} has no training run, and a group is there to compute one"
        )
    ranks = await compute(Ranks.join)
    return Group(ranks, {run.name: run.join(ranks) for run in runs})
