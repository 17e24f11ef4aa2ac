"""The lease: a heartbeat from a thread of its own, on connections of its own, so that a blocked event loop does
not lose it."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence

from redis import exceptions as redis_errors
from redis.connection import AbstractConnection

from taskmesh.broker.scripts import HEARTBEAT
from taskmesh.errors import BrokerError
from taskmesh.worker.deliveries import Source

log = logging.getLogger("taskmesh.worker")
EXIT_BLOCKED = 70


class Heartbeat(threading.Thread):
    """Renews the lease in every partition about four times in a TTL.

    ``struck_off`` is called, from this thread, with a partition in which the worker is no longer on the list.
    ``overrun`` tells by how many seconds the event loop has overrun what it may take; past ``grace`` the process ends,
    since nothing else can end a handler that never gives the loop back.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        ttl: float,
        worker: Callable[[], bytes],
        struck_off: Callable[[Source], object],
        overrun: Callable[[], float],
        grace: float,
    ) -> None:
        super().__init__(name="taskmesh heartbeat", daemon=True)
        self._sources = sources
        self._interval = ttl / 4
        self._worker = worker
        self._struck_off = struck_off
        self._overrun = overrun
        self._grace = grace
        self._ended = threading.Event()
        self._connections: dict[bytes, AbstractConnection] = {}

    def run(self) -> None:
        due = time.monotonic() + self._interval
        while not self._ended.wait(max(0.0, due - time.monotonic())):
            due = time.monotonic() + self._interval
            for source in self._sources:
                if not self._beat(source):
                    due = min(due, time.monotonic() + self._interval / 4)
            if self._overrun() > self._grace:
                log.critical("the event loop has been blocked for too long; this worker ends")
                os._exit(EXIT_BLOCKED)
        for connection in self._connections.values():
            _disconnect(connection)

    def _beat(self, source: Source) -> bool:
        """Renew one lease; False where the server did not answer."""
        server, keys = source.partition.caller.server, source.keys
        shared = keys.tag if server.is_cluster else b""
        try:
            connection = self._connections.get(shared)
            if connection is None:
                connection = server.blocking_connection(keys.tag, timeout=max(1.0, self._interval * 2))
                self._connections[shared] = connection
            worker = self._worker()
            offset_ms = source.partition.caller.clock.offset_ms
            connection.send_command(  # type: ignore[no-untyped-call]
                "EVAL", HEARTBEAT.source, 1, keys.workers, offset_ms, worker
            )
            if connection.read_response() is None and worker == self._worker():
                self._struck_off(source)
            return True
        except (redis_errors.RedisError, OSError, BrokerError) as error:
            log.debug("heartbeat on queue %s: %s", source.queue, error)
            lost = self._connections.pop(shared, None)
            if lost is not None:
                _disconnect(lost)
            return False

    def end(self) -> None:
        """Renew nothing more: the lease runs out, unless the worker has left. Does not wait for the thread."""
        self._ended.set()

    def stop(self) -> None:
        """End the thread."""
        self.end()
        self.join(timeout=self._interval * 2 + 1)


def _disconnect(connection: AbstractConnection) -> None:
    connection.disconnect()  # type: ignore[no-untyped-call]
