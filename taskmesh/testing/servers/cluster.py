"""A cluster, formed by plain commands."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

from redis.crc import key_slot

from taskmesh.testing.servers.binary import Kind
from taskmesh.testing.servers.migration import SlotMigration
from taskmesh.testing.servers.process import START_LIMIT, ServerSet, await_condition, start_all
from taskmesh.testing.servers.sentinel import REPLICATION
from taskmesh.testing.servers.single import RedisServer

SLOTS = 16384
FORMING_TIMEOUT_MS = 1000  # nodes hear of each other the sooner, the shorter it is


class _Self(NamedTuple):
    """What a node says of itself."""

    is_primary: bool
    epoch: int
    slots: tuple[tuple[int, int], ...]

    def serves(self, slot: int) -> bool:
        return self.is_primary and any(first <= slot <= last for first, last in self.slots)


class RedisCluster(ServerSet):
    """Real processes: primaries that share the slots out, each with as many replicas as asked for in all.

    Args:
        replicas: in all; replica number n follows primary number n, and so round again.
        kind: "redis" or "valkey"; None for whichever this machine has, Redis first.
        node_timeout_ms: a node that has not answered the others for so long is lost.
        aof: the nodes write append-only files, so that ``kill`` and ``restart`` lose nothing.
        options: more settings of every node, by name.

    Attributes:
        nodes: the primaries, then the replicas, as they were at the start; the roles change.
    """

    def __init__(
        self,
        primaries: int = 3,
        replicas: int = 0,
        kind: Kind | None = None,
        node_timeout_ms: int = 2000,
        *,
        aof: bool = False,
        options: dict[str, str] | None = None,
    ) -> None:
        settings = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": str(node_timeout_ms),
            "cluster-config-file": "nodes.conf",
            # A replica takes over however long it has not heard of its primary.
            "cluster-replica-validity-factor": "0",
            "cluster-migration-barrier": "100",  # replicas stay with their primaries
            **REPLICATION,
            **(options or {}),
        }
        self.nodes = [RedisServer(kind, aof=aof, options=settings) for _ in range(primaries + replicas)]
        self._primaries = primaries
        self._node_timeout_ms = node_timeout_ms

    @property
    def url(self) -> str:
        """The address of one node that answers; the others are found from there."""
        return next((node for node in self.nodes if node.is_up), self.nodes[0]).url

    def start(self) -> Self:
        """Start the nodes, share the slots out and wait until the cluster is healthy.

        Raises:
            RuntimeError: it did not come up in time.
        """
        start_all(self.nodes)
        primaries = self.nodes[: self._primaries]
        bounds = [SLOTS * place // len(primaries) for place in range(len(primaries) + 1)]
        for node, first, end in zip(primaries, bounds, bounds[1:], strict=False):
            node.command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        self._set_node_timeout(FORMING_TIMEOUT_MS)
        for number, node in enumerate(self.nodes, 1):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", number)  # else they quarrel over it first
        for node in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port)
        await_condition(self._has_met, START_LIMIT, "the nodes of the cluster did not meet")
        for place, node in enumerate(self.nodes[self._primaries :]):
            node.command("CLUSTER", "REPLICATE", self.id_of(primaries[place % len(primaries)]))
        self.wait_until_healthy()
        self._set_node_timeout(self._node_timeout_ms)
        return self

    def _set_node_timeout(self, milliseconds: int) -> None:
        for node in self.nodes:
            node.command("CONFIG", "SET", "cluster-node-timeout", milliseconds)

    def _has_met(self) -> bool:
        return all(_serves(node, len(self.nodes)) for node in self.nodes)

    def wait_until_healthy(self, limit: float = START_LIMIT) -> None:
        """Wait until every node runs and serves, every replica follows, and all agree on who serves what.

        Before that a fault tries nothing: without a replica that is up to date nobody takes over.

        Raises:
            RuntimeError: it did not come to that within ``limit`` seconds.
        """
        await_condition(self._is_healthy, limit, "the nodes of the cluster did not agree")

    def _is_healthy(self) -> bool:
        if not all(node.is_up and _serves(node, len(self.nodes)) for node in self.nodes):
            return False
        told = [node.information("replication") for node in self.nodes]
        following = [one for one in told if one["role"] == "slave"]
        seen = {_shape(node) for node in self.nodes}
        return (
            len(following) == len(self.nodes) - self._primaries
            and all(one["master_link_status"] == "up" for one in following)
            and sum(int(one["connected_slaves"]) for one in told) == len(following)
            and len(seen) == 1
        )

    @staticmethod
    def id_of(node: RedisServer) -> str:
        """The name of a node in the cluster."""
        return _text(node.command("CLUSTER", "MYID"))

    @staticmethod
    def slot_of(tag: bytes) -> int:
        """The slot of all keys with this hash tag."""
        return int(key_slot(tag))

    def node_of(self, slot: int) -> RedisServer:
        """The node that serves a slot: of those that say so and answer, the one with the latest word on it.

        Raises:
            LookupError: none does now.
        """
        serving = [
            (said.epoch, place)
            for place, node in enumerate(self.nodes)
            if node.is_up and (said := _said(node)).serves(slot)
        ]
        if not serving:
            raise LookupError(f"no node serves slot {slot}")
        return self.nodes[max(serving)[1]]

    def primary_of(self, tag: bytes) -> RedisServer:
        """The node that serves the keys with this hash tag."""
        return self.node_of(self.slot_of(tag))

    def primaries(self) -> list[RedisServer]:
        """The nodes that answer and are no replicas."""
        return [node for node in self.nodes if node.is_up and _said(node).is_primary]

    def kill_primary_of(self, tag: bytes) -> RedisServer:
        """End the node that serves these keys without warning; returns it."""
        node = self.primary_of(tag)
        node.kill()
        return node

    def pause_primary_of(self, tag: bytes) -> RedisServer:
        """Freeze the node that serves these keys; returns it."""
        node = self.primary_of(tag)
        node.pause()
        return node

    def hand_over(self, tag: bytes) -> RedisServer:
        """Have a replica take over from the node that serves these keys, in agreement with it; returns the replica.

        Nothing is lost: the primary holds its clients until the replica has caught up.

        Raises:
            LookupError: that node has no replica.
        """
        primary = self.primary_of(tag)
        replica = next(
            (node for node in self.nodes if node.is_up and _primary_id(node) == self.id_of(primary)), None
        )
        if replica is None:
            raise LookupError(f"the node at port {primary.port} has no replica")
        replica.command("CLUSTER", "FAILOVER")
        return self.wait_for_failover(tag, primary)

    def resume(self) -> None:
        """Let every frozen node go on."""
        for node in self.nodes:
            node.resume()

    def restart(self, node: RedisServer) -> None:
        """Start a node again that was killed. It comes back in its old role, until the others tell it otherwise."""
        node.kill()
        node.start()

    def wait_for_failover(self, tag: bytes, lost: RedisServer, limit: float = START_LIMIT) -> RedisServer:
        """Wait until another node than ``lost`` serves these keys and takes writes; returns it.

        Raises:
            RuntimeError: nobody took over within ``limit`` seconds.
        """
        slot = self.slot_of(tag)

        def is_over() -> bool:
            try:
                node = self.node_of(slot)
            except LookupError:
                return False
            return node is not lost and _serves(node, len(self.nodes))

        await_condition(is_over, limit, "no other node took over")
        return self.node_of(slot)

    def migration(self, slot: int, to: RedisServer) -> SlotMigration:
        """The move of a slot to another primary, to be made step by step."""
        return SlotMigration(slot, self.node_of(slot), to, self.primaries())

    def migrate_slot(self, slot: int, to: RedisServer) -> None:
        """Move a slot and its keys to another primary, as redis-cli does, while traffic goes on."""
        self.migration(slot, to).run()

    def stop(self) -> None:
        """End all processes and remove their folders."""
        for node in self.nodes:
            node.stop()


def _serves(node: RedisServer, nodes: int) -> bool:
    """It finds the cluster in order and knows so many nodes."""
    told = _fields(node.command("CLUSTER INFO"))
    return told["cluster_state"] == "ok" and told["cluster_known_nodes"] == str(nodes)


def _said(node: RedisServer) -> _Self:
    """A node's own line among those that it tells of the cluster."""
    [words] = [line for line in _lines(node) if "myself" in line[2]]
    bounds = [word.partition("-") for word in words[8:] if not word.startswith("[")]
    slots = tuple((int(first), int(last or first)) for first, _, last in bounds)
    return _Self("master" in words[2], int(words[6]), slots)


def _primary_id(node: RedisServer) -> str:
    """The name of the node that this one follows; "-" for a primary."""
    [words] = [line for line in _lines(node) if "myself" in line[2]]
    return words[3]


def _shape(node: RedisServer) -> frozenset[tuple[str, ...]]:
    """Who serves which slots and who follows whom, as this node sees it, with the faults that it sees."""
    return frozenset(
        (name, flags.replace("myself,", ""), primary, *slots)
        for name, _, flags, primary, _, _, _, _, *slots in _lines(node)
    )


def _lines(node: RedisServer) -> list[list[str]]:
    with node.client() as client:
        client.set_response_callback("CLUSTER NODES", lambda reply, **_: reply)
        text = _text(client.execute_command("CLUSTER NODES"))
    return [line.split() for line in text.splitlines()]


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _fields(told: Any) -> dict[str, str]:
    if isinstance(told, dict):
        return told
    return dict(line.split(":", 1) for line in _text(told).splitlines() if ":" in line)
