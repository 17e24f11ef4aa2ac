"""The way to the server, and the map from hash tags to nodes.

Single, TLS, Unix socket and Cluster differ in this module and nowhere else. Connections are the redis package's
own (authentication, TLS, protocol), driven directly by ``taskmesh.broker.link``; its retries are off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Mapping
from typing import Any

import redis.connection as blocking
from redis import exceptions as redis_errors
from redis.asyncio import connection as nonblocking
from redis.crc import key_slot

from taskmesh.broker.link import CONNECT_TIMEOUT, Link, discard, error_of_connection
from taskmesh.errors import BrokerError, BrokerRefused, BrokerUnavailable, ConfigurationError, ServerTooOld

MINIMUM_REDIS = (7, 0)
MINIMUM_VALKEY = (8, 0)
Address = tuple[str, int]

# The redis package's blocking counterparts, for the heartbeat's thread.
_BLOCKING: dict[type, Callable[..., blocking.AbstractConnection]] = {
    nonblocking.Connection: blocking.Connection,
    nonblocking.SSLConnection: blocking.SSLConnection,
    nonblocking.UnixDomainSocketConnection: blocking.UnixDomainSocketConnection,
}


class Server:
    """One Redis or Valkey, alone or a cluster. Make it with ``connect``; ``close`` it at the end."""

    def __init__(self, url: str) -> None:
        try:
            parsed: dict[str, Any] = dict(nonblocking.parse_url(url))
        except ValueError as error:
            raise ConfigurationError(f"Redis URL {_without_password(url)!r}: {error}") from None
        self._class: type = parsed.pop("connection_class", nonblocking.Connection)
        if self._class is nonblocking.UnixDomainSocketConnection and "path" not in parsed:
            raise ConfigurationError(
                f"Redis URL {_without_password(url)!r} names no socket: write unix:///path/to/redis.sock"
            )
        # No timeout here: every wait has its own where it is made.
        self._arguments = {**parsed, "socket_timeout": None, "protocol": 2, "socket_read_size": 65536}
        self._arguments.setdefault("socket_connect_timeout", CONNECT_TIMEOUT)
        self.where = _without_password(url)
        self.is_cluster = False
        self.version = ""
        self._slots: list[tuple[int, int, Address]] = []
        self._links: dict[bytes, Link] = {}
        self._refreshing: asyncio.Task[None] | None = None
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
        information = await server._ask_once(None, "INFO", "server")
        server._inspect(_fields(information))
        if server.is_cluster:
            await server._read_slots()
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
        """The connection that everybody shares for commands on this tag's keys."""
        shared = tag if self.is_cluster else b""
        link = self._links.get(shared)
        if link is None:
            link = self._links[shared] = self.dedicated(tag)
        return link

    def dedicated(self, tag: bytes) -> Link:
        """A connection of one's own, for a read that blocks. The caller closes it."""
        return Link(lambda: self._class(**self._arguments_for(tag)), self.where)

    def blocking_connection(self, tag: bytes, timeout: float) -> blocking.AbstractConnection:
        """A connection for a thread; ``timeout`` bounds each send and receive."""
        arguments = {**self._arguments_for(tag), "socket_timeout": timeout, "socket_connect_timeout": timeout}
        return _BLOCKING[self._class](**arguments)

    def node(self, tag: bytes) -> str:
        """Who serves a tag, for people to read: a cluster's node, else the URL without its password."""
        if not self.is_cluster:
            return self.where
        arguments = self._arguments_for(tag)
        return f"{arguments['host']}:{arguments['port']}"

    def _arguments_for(self, tag: bytes) -> dict[str, Any]:
        if not self.is_cluster:
            return self._arguments
        slot = key_slot(tag)
        for first, last, (host, port) in self._slots:
            if first <= slot <= last:
                return {**self._arguments, "host": host, "port": port}
        raise BrokerUnavailable(f"slot {slot} of the cluster at {self.where} is served by no node")

    async def refresh(self) -> None:
        """After trouble: read a cluster's topology again, start an embedded server again that has died.

        One refresh that runs already is shared. ``revive`` is called in a thread.
        """
        if not self.is_cluster and self.revive is None:
            return
        if self._refreshing is None or self._refreshing.done():
            work = self._read_slots() if self.is_cluster else asyncio.to_thread(self.revive or _nothing)
            self._refreshing = asyncio.create_task(work, name="taskmesh refresh")
        await asyncio.shield(self._refreshing)

    async def _read_slots(self) -> None:
        nodes: list[Address | None] = list({address for _, _, address in self._slots})
        random.shuffle(nodes)
        error: BrokerError | None = None
        for node in [*nodes, None]:
            try:
                reply = await self._ask_once(node, "CLUSTER", "SLOTS")
            except BrokerError as failed:
                error = failed
                continue
            seed = node[0] if node else self._arguments.get("host", "localhost")
            slots = [
                (int(first), int(last), (primary[0].decode() or seed, int(primary[1])))
                for first, last, primary, *_ in reply
            ]
            if slots:
                self._slots = slots
                return
        raise error or BrokerUnavailable(f"the cluster at {self.where} serves no slot")

    async def _ask_once(self, node: Address | None, *command: str) -> Any:
        """One command on a connection made for it."""
        arguments = self._arguments if node is None else {**self._arguments, "host": node[0], "port": node[1]}
        where = self.where if node is None else f"{node[0]}:{node[1]}"
        connection = self._class(**arguments)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT):
                await connection.connect()
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
        links, self._links = list(self._links.values()), {}
        for link in links:
            await link.close()


def _nothing() -> None:
    pass


def _fields(information: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in information.decode("utf-8", "replace").splitlines())
    return {name: value for name, colon, value in lines if colon}


def _without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://")
    host = rest.rpartition("@")[2]
    return f"{scheme}{separator}{host.partition('?')[0]}"
