"""Who is alive: a worker's lease is its heartbeat, and a dead worker is one that nobody heard of for a TTL.

How long that is, is reckoned in Redis time alone. But it counts only for an observer whom the server has answered
steadily for a whole TTL: through an outage of the server nobody's heartbeat comes through, and nobody has died. The
claim script looks once more.
"""

from __future__ import annotations

from typing import NamedTuple

from taskmesh.broker.scripts import LOOK
from taskmesh.broker.streams import Partition
from taskmesh.keys import RETURNED, SUSPECTS

BEATS_PER_TTL = 4
MANY_OBSERVERS = 16
NO_ANSWER = -1
STRUCK_OFF = 0


class Beat(NamedTuple):
    """One renewal of a lease: asked for and answered when (monotonic seconds), over which connection.

    ``server_ms`` is Redis time, STRUCK_OFF when the worker is no longer on the list, NO_ANSWER when none came.
    """

    worker: bytes
    began: float
    ended: float
    server_ms: int
    generation: int


class Steadiness:
    """Since when the server has answered a worker's own heartbeats without a break.

    A break is a beat without an answer, a new connection, more time between two answers than the heartbeat may leave,
    or a server's clock that jumps.
    """

    def __init__(self, ttl: float) -> None:
        self._ttl = ttl
        self._since: float | None = None
        self._last: Beat | None = None

    def hear(self, beat: Beat) -> None:
        """Take note of a beat, in the order in which they were asked for. Any thread."""
        last, self._last = self._last, beat
        if beat.server_ms == NO_ANSWER:
            self._since = None
        elif self._since is None or last is None or not self._follows(last, beat):
            self._since = beat.ended
        # A heartbeat that reaches a server which has struck it off shows as well that the server is there.

    def start_again(self) -> None:
        """Redis time has jumped: how long somebody was silent says nothing for a TTL."""
        self._since = None

    def _follows(self, last: Beat, beat: Beat) -> bool:
        passed = beat.ended - last.ended
        if beat.generation != last.generation or passed > self._ttl / 2:
            return False
        return STRUCK_OFF in (beat.server_ms, last.server_ms) or self._agrees(
            last, beat.ended, beat.server_ms
        )

    def _agrees(self, last: Beat, now: float, server_ms: int) -> bool:
        """Whether the server's clock has gone on as the observer's has."""
        return abs((server_ms - last.server_ms) / 1000 - (now - last.ended)) <= self._ttl / 4

    def is_steady(self, now: float, server_ms: int) -> bool:
        """Whether it has held for a TTL, up to now, when it is ``server_ms`` at the server. Any thread."""
        since, last = self._since, self._last
        if since is None or last is None or last.server_ms == STRUCK_OFF:
            return False
        has_lasted = now - since >= self._ttl and now - last.ended <= self._ttl / 2
        return has_lasted and self._agrees(last, now, server_ms)


class Silent(NamedTuple):
    """A worker, and when it was last heard of, as the server writes it."""

    worker: bytes
    last_seen: bytes


class Look(NamedTuple):
    now_ms: int
    workers: int
    silent: list[Silent]


async def look(partition: Partition, ttl: float) -> Look:
    """The workers that have not been heard of for ``ttl`` seconds, what was given back among them.

    Raises:
        BrokerError: the look failed.
    """
    keys = partition.keys
    reply = await partition.caller.run(LOOK, keys.tag, [keys.workers], (int(ttl * 1000),), retry_for=0.0)
    now_ms, count, *flat = reply
    return Look(int(now_ms), int(count), [Silent(*pair) for pair in zip(flat[::2], flat[1::2], strict=True)])


def pause_between_looks(ttl: float, workers: int) -> float:
    """Seconds: a tenth of the TTL, at most 0.1; longer where there are many observers, who look in turn."""
    alone = min(0.1, ttl / 10)
    return min(alone * max(1.0, workers / MANY_OBSERVERS), ttl / 5)


def is_given_back(worker: bytes) -> bool:
    """Whether that is no worker, but holds what is for anybody to take."""
    return worker in (RETURNED, SUSPECTS)


async def live_workers(partition: Partition, ttl: float) -> list[str]:
    """The workers heard of within ``ttl`` seconds of Redis time. For people; claims go by ``look``."""
    tag, key = partition.keys.tag, partition.keys.workers
    (_, _, silent), names = (
        await look(partition, ttl),
        await partition.caller.command(tag, "ZRANGE", key, 0, -1),
    )
    gone = {worker for worker, _ in silent}
    return [worker.decode("utf-8", "replace") for worker in names if worker not in gone]
