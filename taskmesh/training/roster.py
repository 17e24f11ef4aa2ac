"""What a master knows of its workers from step to step: who is alive, whom it avoids, and who holds which shard."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from taskmesh.app.client import Client
from taskmesh.broker.liveness import live_workers
from taskmesh.events import MemoryLost, Observers
from taskmesh.training.setup import RunSetup

log = logging.getLogger("taskmesh.training")
QUARANTINE_AFTER = 3


class Seat(NamedTuple):
    """Who holds a shard, and the name of what its compression remembers there."""

    holder: str = ""
    memory: str = ""


class Roster:
    """One run's workers."""

    def __init__(self, setup: RunSetup, client: Client, observers: Observers) -> None:
        self._setup = setup
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

    def clear_seat(self, shard: int, step: int, reason: str) -> None:
        """What a shard's compression remembered is lost: it begins anew."""
        if self._seats.pop(shard, None) is not None:
            self._tell(step, (shard,), reason)

    def clear_seats(self, step: int, reason: str) -> None:
        """The run goes on from another version: what was remembered since does not belong to it."""
        shards = tuple(sorted(self._seats))
        self._seats.clear()
        if shards:
            self._tell(step, shards, reason)

    def _tell(self, step: int, shards: tuple[int, ...], reason: str) -> None:
        log.warning(
            "run %s, step %d: the compression of shards %s begins anew: %s",
            self._setup.name,
            step,
            list(shards),
            reason,
        )
        self._observers.emit(MemoryLost(self._setup.name, step, shards, reason))
