"""What tests of taskmesh programs need: private servers, deterministic faults, a movable clock, a leak checker."""

from taskmesh.testing.clock import MovableClock
from taskmesh.testing.faults import Fault, Point, arm_from_environment, fail_at
from taskmesh.testing.leaks import KeyLeaks
from taskmesh.testing.proxy import Proxy
from taskmesh.testing.servers import RedisCluster, RedisSentinel, RedisServer, SlotMigration
from taskmesh.testing.wait import wait_until

__all__ = [
    "Fault",
    "KeyLeaks",
    "MovableClock",
    "Point",
    "Proxy",
    "RedisCluster",
    "RedisSentinel",
    "RedisServer",
    "SlotMigration",
    "arm_from_environment",
    "fail_at",
    "wait_until",
]
