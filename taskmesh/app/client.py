"""One process's connection to the Mesh's server: partitions, publishers, inboxes."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from taskmesh.broker.caller import Caller
from taskmesh.broker.connect import Server
from taskmesh.broker.embedded import EmbeddedServer
from taskmesh.broker.publish import Publisher, new_producer
from taskmesh.broker.streams import Partition
from taskmesh.clock import Clock
from taskmesh.errors import TaskmeshError
from taskmesh.events import Observers
from taskmesh.keys import ID_DIGITS, PartitionKeys, partition_digits
from taskmesh.results.inbox import Inbox
from taskmesh.settings import Durability, MeshSettings, QueueOptions
from taskmesh.signing import signer_of

_DEFAULTS = QueueOptions()


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
        self.signer = signer_of(mesh, settings.signing_keys)
        self._queues = queues
        self._clock = clock
        self._observers = observers
        self._embedded = embedded
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._publishers: dict[tuple[str, int, Durability | None], Publisher] = {}
        self._inboxes: dict[tuple[str, int], Inbox] = {}
        self._turns: dict[str, Iterator[int]] = {}
        self._head = self.producer + partition_digits(0)
        self._counts = map("".join, itertools.product(ID_DIGITS, repeat=6))
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

    def options(self, queue: str) -> QueueOptions:
        return self._queues.get(queue, _DEFAULTS)

    def partitions(self, queue: str) -> list[Partition]:
        """All partitions of a queue."""
        return [self.partition(queue, number) for number in range(self.options(queue).partitions)]

    def next_partition(self, queue: str) -> int:
        """The partition for what is submitted next: each in turn."""
        turns = self._turns.get(queue)
        if turns is None:
            turns = self._turns[queue] = itertools.cycle(range(self.options(queue).partitions))
        return next(turns)

    def partition(self, queue: str, number: int = 0) -> Partition:
        partition = self._partitions.get((queue, number))
        if partition is None:
            keys = PartitionKeys(self.mesh, queue, number)
            partition = Partition(self.caller, keys, self.signer, self.settings.max_payload_bytes)
            self._partitions[queue, number] = partition
        return partition

    def publisher(self, queue: str, number: int = 0, durability: Durability | None = None) -> Publisher:
        """The way into a partition; None for the durability takes the settings'."""
        durability = self.settings.durability if durability is None else durability
        if durability is not None and not durability.asks:
            durability = None
        publisher = self._publishers.get((queue, number, durability))
        if publisher is None:
            # Each numbers its batches for itself, and so needs a name of its own.
            producer = self.producer if durability is None else new_producer()
            partition, options = self.partition(queue, number), self.options(queue)
            publisher = Publisher(partition, producer, options, self._observers, durability)
            self._publishers[queue, number, durability] = publisher
        return publisher

    def inbox(self, queue: str, number: int = 0) -> Inbox:
        inbox = self._inboxes.get((queue, number))
        if inbox is None:
            inbox = self._inboxes[queue, number] = Inbox(self.partition(queue, number), self.producer)
        return inbox

    @property
    def outcomes(self) -> int:
        """Outcomes that were pushed to this client."""
        return sum(inbox.pushed for inbox in self._inboxes.values())

    @property
    def repeats(self) -> int:
        """Outcomes among them that had come before: of tasks that were settled twice."""
        return sum(inbox.repeats for inbox in self._inboxes.values())

    def new_id(self, partition: int = 0) -> str:
        """A message id: the producer's 12 characters, two for the partition, and a count of six."""
        if partition == 0:
            return self._head + next(self._counts)
        return f"{self.producer}{partition_digits(partition)}{next(self._counts)}"

    def now_ms(self) -> int:
        """Redis time as this client reckons it: read once, carried on by the monotonic clock."""
        return int(time.monotonic() * 1000 + self._time_offset_ms) + self._clock.offset_ms

    async def read_time(self) -> None:
        seconds, micros = await self.caller.command(b"time", "TIME")
        at = int(seconds) * 1000 + int(micros) / 1000
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
