"""Private servers for tests on loopback ports: one Redis or Valkey, a primary with sentinels, a cluster."""

from taskmesh.testing.servers.binary import Kind, find_binary, free_port
from taskmesh.testing.servers.cluster import RedisCluster
from taskmesh.testing.servers.migration import SlotMigration
from taskmesh.testing.servers.sentinel import RedisSentinel
from taskmesh.testing.servers.single import RedisServer
from taskmesh.testing.servers.tls import Tls

__all__ = [
    "Kind",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "SlotMigration",
    "Tls",
    "find_binary",
    "free_port",
]
