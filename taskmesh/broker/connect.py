"""The way to the server: which connection serves a hash tag, and what happens when that changes.

Single, TLS, Unix socket, Sentinel and Cluster differ in ``address.py`` and ``topology.py`` and nowhere else.
Connections are the redis package's own (authentication, TLS, protocol), driven directly by
``taskmesh.broker.link``; its retries are off.
"""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeVar

from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection

from taskmesh.broker.address import CONNECT_TIMEOUT, Address, Node, read_url
from taskmesh.broker.link import Link, discard, error_of_connection
from taskmesh.broker.sockets import Sockets, Wire
from taskmesh.broker.topology import Cluster, Sentinels, Single, Topology
from taskmesh.errors import BrokerError, BrokerRefused, BrokerUnavailable, ServerTooOld

FOLLOW_EVERY = 1.0
T = TypeVar("T")
_random = Random()  # not the module's: handlers may have seeded that one, and count on it
MINIMUM_REDIS = (7, 0)
MINIMUM_VALKEY = (8, 0)


class Server:
    """One Redis or Valkey, alone, behind sentinels or a cluster. Make it with ``connect``; ``close`` it at the end.

    It belongs to the event loop that it was made in.

    Attributes:
        url: as it was given.
        where: the same without its password.
        revive: brings a dead server back, for one that this machine runs itself.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._address: Address = read_url(url)
        self.where = self._address.where
        self.is_cluster = False
        self.version = ""
        self._topology: Topology = Sentinels(self._address) if self._address.sentinels else Single()
        self._links: dict[Node | None, Link] = {}
        self._sockets = Sockets(self._address, self._name)
        self._dedicated: weakref.WeakKeyDictionary[Link, bytes] = weakref.WeakKeyDictionary()
        self._refreshing: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None
        self.revive: Callable[[], None] | None = None

    @classmethod
    async def connect(cls, url: str) -> Server:
        """Reach the server and see that it will do.

        Raises:
            ConfigurationError: the URL cannot be read.
            BrokerUnavailable: nobody answers there.
            BrokerRefused: the credentials are refused.
            ServerTooOld: it lacks what taskmesh needs.
        """
        server = cls(url)
        await server._topology.read(server._ask)
        node = server._topology.node_of(b"")
        server._inspect(_fields(await server._ask(server._address.arguments, node, "INFO", "server")))
        if isinstance(server._topology, Sentinels):
            following = server._follow(server._topology)
            server._following = asyncio.create_task(following, name="taskmesh failovers")
        if server.is_cluster:
            server._topology = Cluster(server._address)
            await server._topology.read(server._ask)
        return server

    def _inspect(self, information: Mapping[str, str]) -> None:
        self.is_cluster = information.get("redis_mode", information.get("server_mode", "")) == "cluster"
        if "valkey_version" in information:
            name, text, minimum = "Valkey", information["valkey_version"], MINIMUM_VALKEY
        else:
            name, text, minimum = "Redis", information.get("redis_version", "0"), MINIMUM_REDIS
        self.version = f"{name} {text}"
        found = tuple(int(part) if part.isdigit() else 0 for part in text.split(".")[:2])
        if found < minimum:
            wanted = ".".join(map(str, minimum))
            raise ServerTooOld(f"{self.where} is {self.version}; taskmesh needs {name} {wanted} or newer")

    def link(self, tag: bytes) -> Link:
        """The connection to the tag's node that everybody shares.

        Raises:
            BrokerUnavailable: no node serves it.
        """
        node = self._topology.node_of(tag)
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = self._make_link(lambda: node)
        return link

    def dedicated(self, tag: bytes) -> Link:
        """A connection of one's own, for a read that blocks. The caller closes it."""
        link = self._make_link(lambda: self._topology.node_of(tag))
        self._dedicated[link] = tag
        return link

    async def on_socket(self, tag: bytes, work: Callable[[Wire], T]) -> T:
        """Have a thread move large values over a connection to the tag's node.

        Raises:
            BrokerUnavailable: the connection was lost; how much was done is not known.
            BrokerError: the server's answer is an error.
        """
        return await self._sockets.use(self._topology.node_of(tag), work)

    def _make_link(self, find: Callable[[], Node | None]) -> Link:
        def make() -> tuple[AbstractConnection, Node | None, str]:
            node = find()
            place = {} if node is None else {"host": node[0], "port": node[1]}
            connection = self._address.connection(**{**self._address.arguments, **place})
            return connection, node, self._name(node)

        return Link(make, self._on_slow, self._greet if self._address.sentinels else None)

    async def _greet(self, connection: AbstractConnection) -> None:
        """See that a new connection leads to a primary: the sentinels' word may be out of date.

        Raises:
            BrokerUnavailable: it does not.
        """
        await connection.send_command("ROLE")
        role = await connection.read_response()
        if role[0] != b"master":
            raise BrokerUnavailable(f"{self.where} has no primary at the moment")

    def node(self, tag: bytes) -> str:
        """Who serves a tag, for people to read: host and port in a cluster or behind sentinels, else the URL."""
        return self._name(self._topology.node_of(tag))

    def _name(self, node: Node | None) -> str:
        return self.where if node is None else f"{node[0]}:{node[1]}"

    def _on_slow(self) -> None:
        """A node takes its time: it may have been replaced, and nobody tells who waits for it."""
        if self.is_cluster or self._address.sentinels:
            self._start_refresh()

    async def _follow(self, sentinels: Sentinels) -> None:
        """Hear of failovers within a second or so: a primary that was only frozen still takes what it is sent."""
        while True:
            await asyncio.sleep(FOLLOW_EVERY * (0.5 + _random.random()))
            with contextlib.suppress(BrokerError):
                if await sentinels.has_moved(self._ask):
                    await self.refresh()

    async def refresh(self) -> None:
        """After trouble: find the nodes again, start an embedded server again that has died.

        One refresh that runs already is shared. Connections to nodes that are not primaries any more are dropped.

        Raises:
            BrokerError: nobody tells where the nodes are.
        """
        await asyncio.shield(self._start_refresh())

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._refresh(), name="taskmesh refresh")
            self._refreshing.add_done_callback(_heard)
        return self._refreshing

    async def _refresh(self) -> None:
        if self.revive is not None:
            await asyncio.to_thread(self.revive)
        await self._topology.read(self._ask)
        for node in [node for node in self._links if not self._topology.serves(node)]:
            await self._links.pop(node).close()  # whoever waits for it finds the new node's link
        for link, tag in list(self._dedicated.items()):
            if link.node != self._topology.node_of(tag):
                link.drop("given up: its keys have moved")

    async def _ask(
        self,
        arguments: dict[str, Any],
        node: Node | None,
        *command: str,
        timeout: float = CONNECT_TIMEOUT,
    ) -> Any:
        """One command on a connection made for it."""
        if node is not None:
            arguments = {**arguments, "host": node[0], "port": node[1]}
        where = self.where if node is None else f"{node[0]}:{node[1]}"
        connection = self._address.connection(**arguments)
        try:
            async with asyncio.timeout(timeout):
                await connection.connect()  # type: ignore[no-untyped-call]
                await connection.send_command(*command)
                return await connection.read_response()
        except (redis_errors.RedisError, OSError, TimeoutError) as error:
            mapped = error_of_connection(error, where)
            if isinstance(mapped, BrokerRefused) and "unknown command" in str(mapped):
                raise BrokerRefused(f"{where} is not a Redis server that taskmesh knows: {mapped}") from None
            raise mapped from None
        finally:
            await discard(connection)

    async def close(self) -> None:
        """End the shared connections."""
        for task in (self._refreshing, self._following):
            if task is not None:
                task.cancel()
        self._sockets.close()
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()


def _heard(refresh: asyncio.Task[None]) -> None:
    """A refresh that nobody waits for may fail: the next call tells what is wrong."""
    if not refresh.cancelled() and isinstance(refresh.exception(), BrokerError):
        return


def _fields(information: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in information.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}
