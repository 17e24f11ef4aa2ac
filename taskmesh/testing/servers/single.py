"""One Redis or Valkey."""

from __future__ import annotations

from taskmesh.testing.servers.binary import Kind, require_binary
from taskmesh.testing.servers.process import ServerProcess
from taskmesh.testing.servers.tls import Tls


class RedisServer(ServerProcess):
    """One server process in a temporary folder. ``start`` it, ``stop`` it; or use it as a context manager.

    Args:
        kind: "redis" or "valkey"; None for whichever this machine has, Redis first.
        aof: write an append-only file, so that ``kill`` and ``start`` lose nothing.
        maxmemory_bytes: the memory limit, with eviction off; 0 for none.
        options: more of the server's settings, by name.
        tls: makes it speak TLS, and nothing else; Debian's Redis can.
    """

    def __init__(
        self,
        kind: Kind | None = None,
        *,
        aof: bool = False,
        maxmemory_bytes: int = 0,
        options: dict[str, str] | None = None,
        tls: Tls | None = None,
    ) -> None:
        settings = {
            "save": "",
            "appendonly": "yes" if aof else "no",
            "maxmemory": str(maxmemory_bytes),
            "maxmemory-policy": "noeviction",
            **(options or {}),
        }
        super().__init__(require_binary(kind), settings, tls=tls)
