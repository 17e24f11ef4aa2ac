"""What a master knows of its workers from step to step: who is alive, whom it avoids, and who holds which shard."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeVar

from taskmesh.app.client import Client
from taskmesh.broker.liveness import live_workers
from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.checkpoints.tables import memories_of
from taskmesh.events import MemoryLost, Observers
from taskmesh.results.handle import Handle
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")
R = TypeVar("R")
PATIENCE = 10.0
QUARANTINE_AFTER = 3
FIRST_DELAY = 0.005  # after a worker that is avoided has declined; doubled each time
LONGEST_DELAY = 1.0


def pause_after(declines: int) -> float:
    """Seconds before an order goes out again that was declined so often: an idle worker would take it at once."""
    return min(LONGEST_DELAY, FIRST_DELAY * 2.0 ** (declines - 1))


class Seat(NamedTuple):
    """Who holds a shard, and the name of what its compression remembers there.

    Attributes:
        kept: where a checkpoint has it, after the run has come (back) to one; then nobody holds the shard yet.
    """

    holder: str = ""
    memory: str = ""
    kept: Part | None = None


class Roster:
    """One run's workers.

    Args:
        remembers: whether the run's compression remembers something.
    """

    def __init__(self, setup: RunSetup, client: Client, observers: Observers, *, remembers: bool) -> None:
        self._setup = setup
        self._remembers = remembers
        self._client = client
        self._observers = observers
        self._offences: Counter[str] = Counter()
        self._unlike: set[str] = set()
        self._seats: dict[int, Seat] = {}

    async def live_workers(self) -> list[str]:
        partition = self._client.partition(self._setup.name)
        return await live_workers(partition, self._client.settings.liveness_ttl)

    # avoided

    @property
    def quarantined(self) -> tuple[str, ...]:
        """Workers that get no shards while there are others: refused too often, or unlike."""
        offenders = {worker for worker, count in self._offences.items() if count >= QUARANTINE_AFTER}
        return tuple(sorted(offenders | self._unlike))

    @property
    def unlike(self) -> tuple[str, ...]:
        """Workers whose bits would be others."""
        return tuple(sorted(self._unlike))

    async def has_others(self, avoided: Iterable[str]) -> bool:
        """Whether a worker is alive that is not avoided; if not, the quarantine is over for all."""
        if set(await self.live_workers()) <= set(avoided):
            self._offences.clear()
            return False
        return True

    def note_offence(self, worker: str) -> None:
        """A worker's result was refused, and another's of the same shard was not."""
        self._offences[worker] += 1
        if self._offences[worker] == QUARANTINE_AFTER:
            log.warning("run %s: worker %s is avoided from now on", self._setup.name, worker)

    def note_unlike(self, worker: str, fingerprint: str) -> None:
        """A worker's bits would be others: it gets no shards."""
        if worker in self._unlike:
            return
        self._unlike.add(worker)
        log.warning(
            "run %s: worker %s gets no shards: it has %s; this master has %s. Give the Trainer deterministic=False to "
            "let them differ",
            self._setup.name,
            worker,
            fingerprint,
            self._setup.fingerprint,
        )

    # seats

    def seat_of(self, shard: int) -> Seat:
        """Who holds a shard; nobody, where its compression remembers nothing."""
        return self._seats.get(shard, Seat())

    def take_seats(self, seats: Mapping[int, Seat]) -> None:
        """A step was taken: what its contributions led to is what the next ones go on from."""
        self._seats.update(seats)

    @property
    def seats(self) -> dict[int, Seat]:
        """Those of all the shards whose compression remembers something."""
        return dict(self._seats)

    def resume_seats(self, checkpoint: Manifest) -> None:
        """The run goes on from a checkpoint, and so does what was remembered there."""
        self._seats = {
            shard: Seat("", part.root.hex(), part) for shard, part in memories_of(checkpoint.parts).items()
        }
        if self._remembers and checkpoint.step and not self._seats:
            self._tell_of_loss(checkpoint)

    async def answer(self, handle: Handle[R], holder: str) -> R | None:
        """What became of a task; None when it goes to a worker that is not there any more, and was taken back.

        Args:
            holder: the only worker that can do it; "" where any can.
        """
        if not holder:
            return await handle.result()
        look_every = min(PATIENCE, self._client.settings.liveness_ttl) / 4
        waiting = asyncio.create_task(handle.result(), name="taskmesh result")
        try:
            while True:
                await asyncio.wait([waiting], timeout=look_every)
                if waiting.done():
                    return waiting.result()
                if holder not in await self.live_workers():
                    await handle.cancel()
                    return None
        finally:
            waiting.cancel()

    def _tell_of_loss(self, checkpoint: Manifest) -> None:
        """An older release did not keep it."""
        shards = tuple(range(self._setup.shards))
        reason = f"the checkpoint of step {checkpoint.step} does not have what it remembered"
        log.warning(
            "run %s, step %d: the compression of shards %s begins anew: %s",
            self._setup.name,
            checkpoint.step,
            list(shards),
            reason,
        )
        self._observers.emit(MemoryLost(self._setup.name, checkpoint.step, shards, reason))
