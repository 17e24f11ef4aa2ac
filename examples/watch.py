"""Watching a training run: live progress, validation of what is kept, and the loss curve.

All of it comes from taskmesh's public side: ``on_commit`` for the steps, an observer for what went wrong,
``trainer.versions()`` for what is kept, ``monitoring.snapshot`` for who is alive.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

from examples.curve import Curve
from examples.screen import Facts, Screen
from taskmesh import BrokerError, CheckpointError, TaskFailed
from taskmesh.events import Committed, Event, RolledBack, ShardRefused
from taskmesh.monitoring import snapshot
from taskmesh.training import Trainer

LOOK_EVERY = 0.5
RATE_OVER = 20  # steps


class Watch:
    """Watches a run for as long as the block lasts (``async with watch:``), then draws its curve.

    Args:
        title: of the display and the picture.
        facts: with how far the run is to go, and what a step's samples are.
        loss_unit: what the losses are measured in.
        validate: from the number of a kept version to its validation loss.
        folder: where the curve and the picture go.
    """

    def __init__(
        self,
        trainer: Trainer,
        title: str,
        facts: Facts,
        *,
        loss_unit: str,
        validate: Callable[[int], Awaitable[float]],
        folder: Path,
    ) -> None:
        self.facts = facts
        self.curve = Curve(folder / f"{trainer.name}.jsonl")
        self._trainer = trainer
        self._title = title
        self._loss_unit = loss_unit
        self._validate = validate
        self._screen = Screen(title, facts)
        self._leads = False  # from the first commit on: before it, another process may lead the run
        self._times: deque[float] = deque(maxlen=RATE_OVER)
        self._bytes = self._dense_bytes = 0
        self._went_back = False
        self._workers: set[str] = set()  # by name, who was alive at the last look
        self._measured: set[int] = set()  # steps whose kept version has its validation loss
        self._tasks: list[asyncio.Task[None]] = []

    def say(self, text: str) -> None:
        self._screen.say(text)

    async def __aenter__(self) -> Watch:
        self._trainer.mesh.observers.add(self)
        self._screen.__enter__()
        looks = (self._look_at_workers, self._look_at_versions)
        self._tasks = [asyncio.create_task(self._repeat(look)) for look in looks]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        with contextlib.suppress(BrokerError):
            if kind is None:
                await self._look_at_versions()
            await self._tell_the_end(is_interrupted=kind is not None)
        self._screen.__exit__()
        self._draw()

    # from the run

    def on_commit(self, committed: Committed) -> None:
        """To be passed to ``trainer.run``."""
        came_from = committed.step - 1
        if not self._leads:
            self._begin(came_from)
        elif self._went_back:
            self._measured = {step for step in self._measured if step <= came_from}
            self.curve.add("rolled back", self.curve.step, came_from)
        self._leads, self._went_back = True, False
        self.curve.add("loss", committed.step, committed.loss)
        self._times.append(time.monotonic())
        self._bytes += committed.uplink_bytes
        self._dense_bytes += committed.dense_bytes
        self.facts.step, self.facts.loss = committed.step, committed.loss
        self.facts.saved = 1 - self._bytes / self._dense_bytes
        if len(self._times) > 1:
            self.facts.steps_per_s = (len(self._times) - 1) / (self._times[-1] - self._times[0])
        self._screen.show()

    def on_event(self, event: Event) -> None:
        """To be an observer of the Mesh."""
        match event:
            case RolledBack():
                self._went_back = True
            case ShardRefused():
                self.facts.refused += 1

    # looking around

    async def _repeat(self, look: Callable[[], Awaitable[None]]) -> None:
        while True:
            try:
                await look()
            except BrokerError:
                pass  # the server is away: the run waits for it as well, or ends with the error
            await asyncio.sleep(LOOK_EVERY)

    async def _look_at_workers(self) -> None:
        workers = (await snapshot(self._trainer.mesh)).workers
        alive = {worker.name for worker in workers if worker.is_alive}
        gone, self._workers = self._workers - alive, alive
        self.facts.workers = len(alive)
        for name in sorted(gone) if self._leads else ():
            self.say(f"worker {name} is gone; others take its shards over")
            self.curve.add("worker gone", self.curve.step)

    async def _look_at_versions(self) -> None:
        kept = await self._trainer.versions()
        self.facts.versions = len(kept)
        for version in kept if self._leads else ():
            if version.step in self._measured:
                continue
            try:
                loss = await self._validate(version.version)
            except CheckpointError:
                continue  # newer ones have pushed it out meanwhile
            except TaskFailed as error:
                self.say(f"version {version.version} could not be validated: {error}")
                self._measured.add(version.step)
                continue
            self._measured.add(version.step)
            self.facts.validation = (version.step, loss)
            self.curve.add("validation", version.step, loss)

    # beginning and end

    def _begin(self, step: int) -> None:
        """The first commit: now it is known which step the run goes on from."""
        self.curve.take_up(is_new=step == 0)
        measured = [point for point in self.curve.of("validation") if point.step <= step]
        self._measured = {point.step for point in measured}
        if measured:
            self.facts.validation = (measured[-1].step, measured[-1].value)
        if step > 0:
            self.say(f"goes on from step {step}")
        if self.curve.points and self.curve.points[-1].kind not in ("stopped", "end"):
            self.curve.add("killed", self.curve.step, step)

    async def _tell_the_end(self, *, is_interrupted: bool) -> None:
        kept = await self._trainer.versions()
        newest = kept[-1].step if kept else 0
        if self._leads:
            self._screen.show(now=True)
            self.curve.add("stopped" if is_interrupted else "end", self.curve.step, newest)
        if is_interrupted:
            self.say(f"stopped at step {self.facts.step}: started again, it goes on from step {newest}")
        elif not self._leads:
            self.say(
                f"the run has its {newest} steps already: --steps {2 * newest} takes it on; "
                "to begin anew, remove the folder .taskmesh or give it another server"
            )

    def _draw(self) -> None:
        if not self.curve.step:
            return
        picture = self.curve.path.with_suffix(".png")
        try:
            from examples.picture import draw
        except ModuleNotFoundError:
            self.say("no picture of the loss curve: matplotlib is missing (pip install 'taskmesh[examples]')")
        else:
            draw(self.curve, picture, title=self._title, loss_unit=self._loss_unit)
            self.say(f"loss curve: {picture}")
