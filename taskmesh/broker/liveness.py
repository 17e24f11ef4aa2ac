"""Who is alive: a worker's lease is its heartbeat, and a dead worker is one that nobody saw for a TTL.

Its last-seen, in Redis time, must have stood unchanged for the whole TTL before the eyes of one observer, on an
unbroken connection: a restart of the server, a failover or a lost connection starts that time again, so that an
outage of the server is never taken for the death of its workers. The claim script looks once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from taskmesh.broker.streams import Partition
from taskmesh.keys import RETURNED, SUSPECTS


class Dead(NamedTuple):
    """A worker to claim from, and the last-seen that was observed."""

    worker: bytes
    last_seen: bytes


class Witness:
    """What one observer has seen of the workers of one partition."""

    def __init__(self, ttl: float) -> None:
        self.ttl = ttl
        self._generation = -1
        self._unchanged_since: dict[bytes, tuple[bytes, float]] = {}

    def observe(self, rows: Sequence[tuple[bytes, bytes]], now: float, generation: int) -> list[Dead]:
        """Take one look and say who is dead.

        Args:
            rows: worker and last-seen of all.
            now: monotonic seconds at which the look was begun.
            generation: of the connection that it was taken on.
        """
        if generation != self._generation:
            self._generation = generation
            self._unchanged_since.clear()
        before, self._unchanged_since = self._unchanged_since, {}
        dead: list[Dead] = []
        for worker, last_seen in rows:
            if worker in (RETURNED, SUSPECTS):
                dead.append(Dead(worker, last_seen))
                continue
            seen, since = before.get(worker, (b"", now))
            if seen != last_seen:
                since = now
            self._unchanged_since[worker] = (last_seen, since)
            if now - since >= self.ttl:
                dead.append(Dead(worker, last_seen))
        return dead


async def look(partition: Partition) -> tuple[list[tuple[bytes, bytes]], int]:
    """Worker and last-seen of every worker of a partition, and the generation of the connection used.

    Raises:
        BrokerError: the look failed.
    """
    keys = partition.keys
    link = partition.caller.server.link(keys.tag)
    flat = await link.call("ZRANGE", keys.workers, 0, -1, "WITHSCORES")
    return list(zip(flat[::2], flat[1::2], strict=True)), link.generation


async def live_workers(partition: Partition, ttl: float) -> list[str]:
    """The workers heard of within ``ttl`` seconds of Redis time. For people; claims go by ``Witness``."""
    rows, _ = await look(partition)
    seconds, micros = await partition.caller.command(partition.keys.tag, "TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000 + partition.caller.clock.offset_ms
    return [worker.decode() for worker, seen in rows if now_ms - float(seen) <= ttl * 1000]
