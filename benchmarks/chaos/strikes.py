"""What can be done to any server. Everything here blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import cast

import redis

from taskmesh.testing.servers.process import ServerProcess
from taskmesh.testing.servers.single import RedisServer

TINY_BYTES = 1  # a memory limit that everything exceeds
LAG = 0.3
# A server that waits for its disk under "everysec" answers before it has written: killed then, it forgets what it
# had acknowledged. Without fsync it always writes first, and a process that is killed loses nothing.
AOF = {"appendfsync": "no", "auto-aof-rewrite-percentage": "0"}
Sleep = Callable[[float], object]


def aof_folder(client: redis.Redis) -> Path:
    """Where a server keeps its append-only files."""
    told = cast(dict[str, str], client.config_get("dir", "appenddirname"))
    return Path(told["dir"], told["appenddirname"])


def set_limit(client: redis.Redis, limit_bytes: int) -> None:
    client.config_set("maxmemory", limit_bytes)


def folders_of(nodes: Sequence[RedisServer]) -> dict[str, Path]:
    folders = {}
    for node in nodes:
        with node.client() as client:
            folders[name_of(nodes, node)] = aof_folder(client)
    return folders


def name_of(nodes: Sequence[RedisServer], node: RedisServer) -> str:
    return f"node-{nodes.index(node)}"


def fill(nodes: Sequence[RedisServer], seconds: float, sleep: Sleep) -> None:
    """Let nodes be at their memory limit for so long."""
    for node in nodes:
        with node.client() as client:
            set_limit(client, TINY_BYTES)
    sleep(seconds)
    for node in nodes:
        with node.client() as client:
            set_limit(client, 0)


@contextlib.contextmanager
def kept_behind(primary: RedisServer, replicas: Sequence[RedisServer], target: int) -> Iterator[None]:
    """Every other time, keep the replicas away for a moment: what the primary does in it, it does alone."""
    if target % 2:
        for replica in replicas:
            replica.pause()
        with primary.client() as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "replica")
        time.sleep(LAG)
    try:
        yield
    finally:
        for replica in replicas:
            replica.resume()


def restart(process: ServerProcess, seconds: float, sleep: Sleep) -> None:
    """Kill a server, and start it again."""
    process.kill()
    sleep(seconds)
    process.start()


def revive(process: ServerProcess) -> None:
    process.resume()
    if not process.is_up:
        process.start()


def heal_nodes(nodes: Sequence[RedisServer]) -> None:
    for node in nodes:
        revive(node)
        with node.client() as client:
            set_limit(client, 0)
