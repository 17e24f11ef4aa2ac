"""Primaries with replicas: under sentinels, and in a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import redis

from benchmarks.chaos.app import QUEUES, mesh
from benchmarks.chaos.schedule import Kind
from benchmarks.chaos.strikes import (
    AOF,
    Sleep,
    fill,
    folders_of,
    heal_nodes,
    kept_behind,
    name_of,
    restart,
    revive,
)
from taskmesh import QueueOptions
from taskmesh.keys import PartitionKeys
from taskmesh.testing.servers.binary import Kind as ServerKind
from taskmesh.testing.servers.cluster import RedisCluster
from taskmesh.testing.servers.migration import SlotMigration
from taskmesh.testing.servers.sentinel import SERVICE, RedisSentinel
from taskmesh.testing.servers.single import RedisServer

HEAL_LIMIT = 60.0
KEYS_AT_ONCE = 5  # in a slot migration


class Sentinel:
    """A primary with two replicas, and three sentinels."""

    def __init__(self, kind: ServerKind | None, sleep: Sleep) -> None:
        self._sleep = sleep
        self._servers = RedisSentinel(kind=kind, aof=True, options=AOF)

    def start(self) -> None:
        self._servers.start()

    def stop(self) -> None:
        self._servers.stop()

    def nodes(self) -> dict[str, Path]:
        return folders_of(self._servers.nodes)

    def primaries(self) -> list[str]:
        return [name_of(self._servers.nodes, self._servers.primary)]

    def ports(self) -> list[int]:
        return [process.port for process in (*self._servers.sentinels, *self._servers.nodes)]

    def environment(self, ports: Sequence[int]) -> dict[str, str]:
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports[: len(self._servers.sentinels)])
        return {"TASKMESH_URL": f"redis+sentinel://{hosts}/{SERVICE}/0"}

    def strike(self, kind: Kind, target: int, seconds: float, share: float) -> int:
        servers = self._servers
        match kind:
            case Kind.FULL:
                fill([servers.primary], seconds, self._sleep)
            case Kind.REPLICA_RESTART:
                restart(servers.replicas[target % len(servers.replicas)], seconds, self._sleep)
            case Kind.SENTINEL_RESTART:
                restart(servers.sentinels[target % len(servers.sentinels)], seconds, self._sleep)
            case Kind.PRIMARY_KILL:
                servers.wait_until_healthy(HEAL_LIMIT)
                with kept_behind(servers.primary, servers.replicas, target):
                    lost = servers.kill_primary()
                servers.wait_for_failover(lost)
                self._sleep(seconds)
                servers.restart(lost)
            case Kind.PRIMARY_STOP:
                servers.wait_until_healthy(HEAL_LIMIT)
                lost = servers.pause_primary()
                servers.wait_for_failover(lost)
                self._sleep(seconds)
                lost.resume()
            case Kind.PRIMARY_RESTART:
                servers.wait_until_healthy(HEAL_LIMIT)
                restart(servers.primary, seconds, self._sleep)
            case _:
                raise ValueError(kind)
        return 1

    def heal(self) -> None:
        for sentinel in self._servers.sentinels:
            revive(sentinel)
        heal_nodes(self._servers.nodes)
        self._servers.wait_until_healthy(HEAL_LIMIT)


class Cluster:
    """Three primaries with a replica each."""

    def __init__(self, kind: ServerKind | None, sleep: Sleep) -> None:
        self._sleep = sleep
        self._servers = RedisCluster(3, 3, kind, node_timeout_ms=1000, aof=True, options=AOF)

    def start(self) -> None:
        self._servers.start()

    def stop(self) -> None:
        self._servers.stop()

    def nodes(self) -> dict[str, Path]:
        return folders_of(self._servers.nodes)

    def primaries(self) -> list[str]:
        return [name_of(self._servers.nodes, node) for node in self._servers.primaries()]

    def ports(self) -> list[int]:
        return [node.port for node in self._servers.nodes]

    def environment(self, ports: Sequence[int]) -> dict[str, str]:
        return {"TASKMESH_URL": f"redis://127.0.0.1:{ports[0]}/0"}

    def strike(self, kind: Kind, target: int, seconds: float, share: float) -> int:
        servers, tag = self._servers, self._tag(target)
        match kind:
            case Kind.FULL:
                fill(servers.primaries(), seconds, self._sleep)
            case Kind.REPLICA_RESTART:
                replicas = self._replicas()
                restart(replicas[target % len(replicas)], seconds, self._sleep)
            case Kind.SLOT_MIGRATION:
                servers.wait_until_healthy(HEAL_LIMIT)
                source = servers.primary_of(tag)
                others = [node for node in servers.primaries() if node is not source]
                self._migrate(servers.migration(servers.slot_of(tag), others[target % len(others)]))
            case Kind.PRIMARY_KILL:
                servers.wait_until_healthy(HEAL_LIMIT)
                with kept_behind(servers.primary_of(tag), self._replicas(), target):
                    lost = servers.kill_primary_of(tag)
                servers.wait_for_failover(tag, lost)
                self._sleep(seconds)
                servers.restart(lost)
            case Kind.PRIMARY_STOP:
                servers.wait_until_healthy(HEAL_LIMIT)
                lost = servers.pause_primary_of(tag)
                servers.wait_for_failover(tag, lost)
                self._sleep(seconds)
                lost.resume()
            case Kind.PRIMARY_RESTART:
                servers.wait_until_healthy(HEAL_LIMIT)
                restart(servers.primary_of(tag), seconds, self._sleep)
            case _:
                raise ValueError(kind)
        return 1

    @staticmethod
    def _migrate(migration: SlotMigration) -> None:
        """Slowly, so that much happens meanwhile; a step that fails is made again, for nothing else would end it."""
        give_up_at = time.monotonic() + HEAL_LIMIT
        migration.begin()
        while True:
            try:
                while migration.move(count=KEYS_AT_ONCE):
                    time.sleep(0.01)
                migration.finish()
                return
            except redis.RedisError:
                if time.monotonic() > give_up_at:
                    raise
                time.sleep(0.1)

    def _replicas(self) -> list[RedisServer]:
        primaries = self._servers.primaries()
        return [node for node in self._servers.nodes if node not in primaries]

    def _tag(self, target: int) -> bytes:
        """The hash tag of one of the run's partitions."""
        tags = [
            PartitionKeys(mesh.name, queue, number).tag
            for queue in QUEUES
            for number in range(mesh.queues.get(queue, QueueOptions()).partitions)
        ]
        return tags[target // 7 % len(tags)]

    def heal(self) -> None:
        heal_nodes(self._servers.nodes)
        self._servers.wait_until_healthy(HEAL_LIMIT)
