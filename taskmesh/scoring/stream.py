"""Scoring rows one by one: submitted singly, scored in batches, each caller gets its own row's score."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from taskmesh.app.mesh import Mesh
from taskmesh.errors import InvalidArguments
from taskmesh.results.handle import Handle, Handles
from taskmesh.scoring.models import RunModel
from taskmesh.tasks import Batch, TaskOptions

Row = Sequence[float] | npt.NDArray[Any]
Score = float | list[float]
ScoreFunction = Callable[[nn.Module, Tensor], Tensor]
RESULT_TTL = 60.0


class Scorer:
    """A registered scorer; made by ``scorer``.

    ``score.submit(row)`` sends a row to a worker; ``score(model, rows)`` runs the function right here.
    """

    def __init__(self, mesh: Mesh, name: str, model: RunModel, function: ScoreFunction, batch: Batch) -> None:
        self._mesh = mesh
        self._model = model
        self._function = function
        # One batch at a time: two would take each other's cores. The event loop stays free meanwhile.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"taskmesh score {name}")
        options = TaskOptions(queue=name, batch=batch, result_ttl=RESULT_TTL)
        self._task = mesh.add_task(self._score_rows, name, options)
        self.name = name

    def __repr__(self) -> str:
        return f"<scorer {self.name!r} with the model of run {self._model.run!r}>"

    def __call__(self, model: nn.Module, rows: Tensor) -> Tensor:
        return self._function(model, rows)

    async def submit(self, row: Row) -> Handle[Any]:
        """Send one row, of shape (features,).

        The handle's result is the row's score: a float, or a list of them where the function gives several.

        Raises:
            as ``Task.submit``.
        """
        return await self._task.submit(row)

    async def submit_many(self, rows: Iterable[Row]) -> Handles[Any]:
        """Send rows; each has a handle of its own."""
        return await self._task.submit_many(self._task.bind(row) for row in rows)

    async def refresh(self, version: int | None = None) -> int:
        """Let this process's model be another version (the newest by default); returns which it is now.

        Raises:
            CheckpointError: there is no such version, or it is damaged; the model stays as it was.
        """
        return (await self._model.refresh(self._mesh, version)).version

    async def _score_rows(self, rows: list[Any]) -> list[Score | Exception]:
        """The batch handler: a row that is no row of numbers has an error of its own."""
        model = (await self._model.get(self._mesh)).model
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._thread, self._score, model, rows)

    def _score(self, model: nn.Module, rows: list[Any]) -> list[Score | Exception]:
        scores: list[Score | Exception] = []
        read: list[npt.NDArray[np.float32]] = []
        places: list[int] = []
        for place, row in enumerate(rows):
            try:
                read.append(_read_row(row))
                places.append(place)
                scores.append(0.0)
            except InvalidArguments as error:
                scores.append(error)
        if not read:
            return scores
        with torch.inference_mode():
            # Rows of unequal length raise here, or in the model: the engine then tries halves of the batch.
            found = self._function(model, torch.from_numpy(np.stack(read)))
        if found.shape[:1] != (len(read),):
            raise TypeError(f"scorer {self.name!r} returned shape {tuple(found.shape)} for {len(read)} rows")
        for place, score in zip(places, found.tolist(), strict=True):
            scores[place] = score
        return scores


def _read_row(row: Any) -> npt.NDArray[np.float32]:
    try:
        values = np.asarray(row, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidArguments(f"not a row of numbers: {error}") from None
    if values.ndim != 1:
        raise InvalidArguments(f"a row has one dimension; this one has shape {values.shape}")
    return values


def scorer(
    mesh: Mesh, name: str, *, model: RunModel, batch: Batch | None = None
) -> Callable[[ScoreFunction], Scorer]:
    """Register a scorer: ``@scorer(mesh, "risk", model=from_run("fraud"))``.

    The function gets the model, in evaluation mode and without gradients, and rows as an fp32 tensor of shape
    (rows, features); it returns a tensor whose first dimension is the rows. It runs in a thread.

    Args:
        name: of the task, and of its queue.
        batch: how many rows are gathered, and how long the first one waits.

    Raises:
        ConfigurationError: the name is taken or cannot be used.
    """

    def register(function: ScoreFunction) -> Scorer:
        return Scorer(mesh, name, model, function, batch or Batch())

    return register
