"""A primary with replicas, watched by sentinels."""

from __future__ import annotations

from collections import Counter
from typing import Any, Self

from taskmesh.testing.servers.binary import Kind, require_binary
from taskmesh.testing.servers.process import START_LIMIT, ServerProcess, ServerSet, await_condition, start_all
from taskmesh.testing.servers.single import RedisServer

SERVICE = "taskmesh"
HEALTHY_LIMIT = 60.0
# Replicas follow at once, and the primary hears from them every second.
REPLICATION = {"repl-diskless-sync-delay": "0", "repl-ping-replica-period": "1"}
BRISK_PERIODS_MS = {"info-period": 500, "publish-period": 500}


class RedisSentinel(ServerSet):
    """Real processes: one primary, its replicas, and the sentinels that choose another primary when it is lost.

    Args:
        kind: "redis" or "valkey"; None for whichever this machine has, Redis first.
        down_after_ms: a primary that has not answered the sentinels for so long is lost.
        aof: the servers write append-only files.
        brisk: the sentinels look around more often than by default, so that an old primary that comes back is made a
            replica within about 3 s and not 20.
        options: more settings of the primary and of the replicas (``min-replicas-to-write``, say), by name.

    Attributes:
        nodes: primary and replicas, in the order in which they were started; the roles change.
        sentinels: the sentinels' processes.
    """

    def __init__(
        self,
        replicas: int = 2,
        sentinels: int = 3,
        kind: Kind | None = None,
        down_after_ms: int = 1000,
        *,
        aof: bool = False,
        brisk: bool = True,
        options: dict[str, str] | None = None,
    ) -> None:
        settings = {**REPLICATION, **(options or {})}
        first = RedisServer(kind, aof=aof, options=settings)
        following = {**settings, "replicaof": f"127.0.0.1 {first.port}"}
        self.nodes = [first, *(RedisServer(kind, aof=aof, options=following) for _ in range(replicas))]
        watching = {
            f"sentinel monitor {SERVICE}": f"127.0.0.1 {first.port} {sentinels // 2 + 1}",
            f"sentinel down-after-milliseconds {SERVICE}": str(down_after_ms),
            f"sentinel failover-timeout {SERVICE}": "5000",
            f"sentinel parallel-syncs {SERVICE}": str(max(1, replicas)),
        }
        binary = require_binary(kind)
        self._periods_ms = BRISK_PERIODS_MS if brisk else {}
        self.sentinels = [ServerProcess(binary, watching, "--sentinel") for _ in range(sentinels)]

    @property
    def url(self) -> str:
        """All sentinels, and the name by which they know the primary."""
        hosts = ",".join(f"127.0.0.1:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{SERVICE}/0"

    @property
    def primary(self) -> RedisServer:
        """The node that most sentinels name."""
        [(port, _)] = Counter(self._named_by(sentinel) for sentinel in self._watchers()).most_common(1)
        return next(node for node in self.nodes if node.port == port)

    @property
    def replicas(self) -> list[RedisServer]:
        """The other nodes."""
        primary = self.primary
        return [node for node in self.nodes if node is not primary]

    @property
    def failovers(self) -> int:
        """A number that rises with every failover, the unplanned ones of servers that are too slow among them."""
        told = (_pairs(sentinel.command("SENTINEL", "MASTER", SERVICE)) for sentinel in self._watchers())
        return max(int(fields["config-epoch"]) for fields in told)

    def _watchers(self) -> list[ServerProcess]:
        return [sentinel for sentinel in self.sentinels if sentinel.is_up]

    def _named_by(self, sentinel: ServerProcess) -> int:
        return int(sentinel.command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE)[1])

    def start(self) -> Self:
        """Start all processes and wait until they are healthy.

        Raises:
            RuntimeError: they did not come up in time.
        """
        start_all(self.nodes)
        # A sentinel looks for replicas every 10 s: they are found at once where they are there already.
        await_condition(
            self._is_replicated_from_first, START_LIMIT, "the replicas did not follow the primary"
        )
        start_all(self.sentinels)
        for sentinel in self.sentinels:
            for period, milliseconds in self._periods_ms.items():
                sentinel.command("SENTINEL", "DEBUG", period, milliseconds)
        self.wait_until_healthy()
        return self

    def _is_replicated_from_first(self) -> bool:
        return _is_replicated(self.nodes[0], self.nodes[1:])

    def wait_until_healthy(self, limit: float = HEALTHY_LIMIT) -> None:
        """Wait until every node runs, every replica follows the primary, and the sentinels all see just that.

        Before that a fault tries nothing: without a replica that is up to date nobody takes over.

        Raises:
            RuntimeError: it did not come to that within ``limit`` seconds.
        """
        await_condition(self._is_healthy, limit, "primary, replicas and sentinels did not agree")

    def _is_healthy(self) -> bool:
        if not all(process.is_up for process in [*self.nodes, *self.sentinels]):
            return False
        primary = self.primary
        return _is_replicated(primary, self.replicas) and all(
            self._is_content(sentinel, primary) for sentinel in self.sentinels
        )

    def _is_content(self, sentinel: ServerProcess, primary: RedisServer) -> bool:
        """It sees the primary, all replicas and all other sentinels, and no fault in any."""
        watched = _pairs(sentinel.command("SENTINEL", "MASTER", SERVICE))
        seen = [_pairs(row) for row in sentinel.command("SENTINEL", "REPLICAS", SERVICE)]
        return (
            watched["port"] == str(primary.port)
            and watched["flags"] == "master"
            and watched["num-other-sentinels"] == str(len(self.sentinels) - 1)
            and sorted(int(row["port"]) for row in seen) == sorted(node.port for node in self.replicas)
            and all(row["flags"] == "slave" and row["master-link-status"] == "ok" for row in seen)
        )

    def kill_primary(self) -> RedisServer:
        """End the primary without warning; returns it."""
        primary = self.primary
        primary.kill()
        return primary

    def pause_primary(self) -> RedisServer:
        """Freeze the primary; returns it."""
        primary = self.primary
        primary.pause()
        return primary

    def resume(self) -> None:
        """Let every frozen node go on."""
        for node in self.nodes:
            node.resume()

    def restart(self, node: RedisServer) -> None:
        """Start a node again that was killed. It comes back in its old role, until the sentinels tell it otherwise."""
        node.kill()
        node.start()

    def wait_for_failover(self, lost: RedisServer, limit: float = START_LIMIT) -> RedisServer:
        """Wait until the sentinels name another primary than ``lost`` and it takes writes; returns it.

        Raises:
            RuntimeError: nobody took over within ``limit`` seconds.
        """

        def is_over() -> bool:
            primary = self.primary
            return primary is not lost and bool(primary.information("replication")["role"] == "master")

        await_condition(is_over, limit, "no other primary took over")
        return self.primary

    def stop(self) -> None:
        """End all processes and remove their folders."""
        for process in [*self.sentinels, *self.nodes]:
            process.stop()


def _is_replicated(primary: RedisServer, replicas: list[RedisServer]) -> bool:
    """Every one of the replicas follows the primary, and the primary has them all online."""
    told = primary.information("replication")
    online = [told.get(f"slave{number}", {}).get("state") == "online" for number in range(len(replicas))]
    return bool(
        told["role"] == "master" and all(online) and all(_follows(node, primary) for node in replicas)
    )


def _follows(node: RedisServer, primary: RedisServer) -> bool:
    told = node.information("replication")
    state = (told["role"], told.get("master_port"), told.get("master_link_status"))
    return state == ("slave", primary.port, "up")


def _pairs(reply: Any) -> dict[str, str]:
    """The fields of a sentinel's answer, whichever way the client package read it."""
    if isinstance(reply, dict):
        return {_text(key): _text(value) for key, value in reply.items()}
    return {_text(key): _text(value) for key, value in zip(reply[::2], reply[1::2], strict=True)}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
