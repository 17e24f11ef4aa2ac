"""One process's connection to the Mesh's server: partitions, publishers, inboxes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from taskmesh.broker.caller import Caller
from taskmesh.broker.connect import Server
from taskmesh.broker.embedded import EmbeddedServer
from taskmesh.broker.publish import Publisher, new_producer
from taskmesh.broker.streams import Partition
from taskmesh.clock import Clock
from taskmesh.errors import TaskmeshError
from taskmesh.events import Observers
from taskmesh.keys import PartitionKeys
from taskmesh.results.inbox import Inbox
from taskmesh.settings import MeshSettings, QueueOptions


class Client:
    """Made by ``Mesh`` when it is entered; everything in it lives as long as the connection."""

    def __init__(
        self,
        mesh: str,
        settings: MeshSettings,
        queues: Mapping[str, QueueOptions],
        clock: Clock,
        observers: Observers,
        caller: Caller,
        bulk: Caller,
        embedded: list[EmbeddedServer],
    ) -> None:
        self.mesh = mesh
        self.settings = settings
        self.caller = caller
        self.bulk = bulk
        self.producer = new_producer()
        self._queues = queues
        self._clock = clock
        self._observers = observers
        self._embedded = embedded
        self._partitions: dict[str, Partition] = {}
        self._publishers: dict[str, Publisher] = {}
        self._inboxes: dict[str, Inbox] = {}
        self._count = 0
        self._time_offset_ms = 0.0

    @classmethod
    async def connect(
        cls,
        mesh: str,
        settings: MeshSettings,
        queues: Mapping[str, QueueOptions],
        clock: Clock,
        observers: Observers,
    ) -> Client:
        """Reach the server, or start the embedded ones.

        Raises:
            BrokerError: it cannot be reached, refuses, or is too old.
        """
        embedded: list[EmbeddedServer] = []
        servers: list[Server] = []
        try:
            if settings.url is not None:
                server = await Server.connect(settings.url)
            else:
                server = await _connect_embedded(settings.data_folder, embedded, "redis", persist=True)
            servers.append(server)
            bulk = server
            if settings.bulk_url is not None:
                bulk = await Server.connect(settings.bulk_url)
            elif settings.url is None:
                bulk = await _connect_embedded(settings.data_folder, embedded, "bulk", persist=False)
            if bulk is not server:
                servers.append(bulk)
            caller = Caller(server, clock, settings.retry_for)
            client = cls(
                mesh,
                settings,
                queues,
                clock,
                observers,
                caller,
                caller if bulk is server else Caller(bulk, clock, settings.retry_for),
                embedded,
            )
            await client.read_time()
            return client
        except BaseException:
            for server in servers:
                await server.close()
            for share in embedded:
                share.release()
            raise

    async def close(self) -> None:
        """Let what is being submitted finish, and end the connections."""
        await asyncio.gather(*(publisher.close() for publisher in self._publishers.values()))
        for inbox in self._inboxes.values():
            await inbox.close()
        await self.caller.server.close()
        if self.bulk is not self.caller:
            await self.bulk.server.close()
        for share in self._embedded:
            share.release()

    def partition(self, queue: str) -> Partition:
        partition = self._partitions.get(queue)
        if partition is None:
            partition = self._partitions[queue] = Partition(self.caller, PartitionKeys(self.mesh, queue, 0))
        return partition

    def publisher(self, queue: str) -> Publisher:
        publisher = self._publishers.get(queue)
        if publisher is None:
            options = self._queues.get(queue, QueueOptions())
            publisher = Publisher(self.partition(queue), self.producer, options, self._observers)
            self._publishers[queue] = publisher
        return publisher

    def inbox(self, queue: str) -> Inbox:
        inbox = self._inboxes.get(queue)
        if inbox is None:
            inbox = self._inboxes[queue] = Inbox(self.partition(queue), self.producer)
        return inbox

    @property
    def outcomes(self) -> int:
        """Outcomes that were pushed to this client."""
        return sum(inbox.pushed for inbox in self._inboxes.values())

    @property
    def repeats(self) -> int:
        """Outcomes among them that had come before: of tasks that were settled twice."""
        return sum(inbox.repeats for inbox in self._inboxes.values())

    def new_id(self) -> str:
        """A message id: the producer's 12 characters and a count."""
        self._count += 1
        return f"{self.producer}{self._count:08x}"

    def now_ms(self) -> int:
        """Redis time as this client reckons it: read once, carried on by the monotonic clock."""
        return int(time.monotonic() * 1000 + self._time_offset_ms)

    async def read_time(self) -> None:
        seconds, micros = await self.caller.command(b"time", "TIME")
        at = int(seconds) * 1000 + int(micros) / 1000 + self._clock.offset_ms
        self._time_offset_ms = at - time.monotonic() * 1000


async def _connect_embedded(
    folder: Path, shares: list[EmbeddedServer], name: str, *, persist: bool
) -> Server:
    share = await asyncio.to_thread(EmbeddedServer.acquire, folder, persist=persist, name=name)
    shares.append(share)
    server = await Server.connect(share.url)

    def revive() -> None:
        try:
            EmbeddedServer.acquire(folder, persist=persist, name=name).release()
        except TaskmeshError:
            pass  # the next call to the server says that it is away

    server.revive = revive
    return server
