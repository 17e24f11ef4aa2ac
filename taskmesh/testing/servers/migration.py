"""The move of one slot from a cluster's node to another, in steps, while traffic goes on."""

from __future__ import annotations

from collections.abc import Sequence

from taskmesh.testing.servers.single import RedisServer

AT_ONCE = 100
MOVE_LIMIT_MS = 5000


class SlotMigration:
    """What redis-cli does to move a slot: ``begin``, ``move`` until nothing is left, ``finish``; or ``run`` for all.

    Between ``begin`` and ``finish`` the slot is half-way: a command whose keys are all still there is served by the
    source, one whose keys are partly gone is put off (TRYAGAIN), one whose keys are all gone is sent on (ASK).

    Attributes:
        slot: its number.
        source: who has had it so far.
        target: who gets it.
    """

    def __init__(
        self, slot: int, source: RedisServer, target: RedisServer, primaries: Sequence[RedisServer]
    ) -> None:
        self.slot = slot
        self.source = source
        self.target = target
        self._others = [node for node in primaries if node is not source and node is not target]

    def begin(self) -> None:
        """Tell both ends."""
        self.target.command("CLUSTER", "SETSLOT", self.slot, "IMPORTING", _id(self.source))
        self.source.command("CLUSTER", "SETSLOT", self.slot, "MIGRATING", _id(self.target))

    def keys(self, count: int = 10_000) -> list[bytes]:
        """Keys of the slot that the source still holds."""
        found: list[bytes | str] = self.source.command("CLUSTER", "GETKEYSINSLOT", self.slot, count)
        return [key.encode() if isinstance(key, str) else key for key in found]

    def move(self, keys: Sequence[bytes] | None = None, count: int = AT_ONCE) -> int:
        """Move these keys, or up to ``count`` of those that are left; returns how many were asked for.

        A key that has gone meanwhile is passed over.
        """
        chosen = self.keys(count) if keys is None else list(keys)
        if chosen:
            self.source.command(
                "MIGRATE", "127.0.0.1", self.target.port, "", 0, MOVE_LIMIT_MS, "KEYS", *chosen
            )
        return len(chosen)

    def finish(self) -> None:
        """Move what is left and let every primary know, the new owner first: it must not refuse who is sent on."""
        while self.move():
            pass
        owner = _id(self.target)
        for node in (self.target, self.source, *self._others):
            node.command("CLUSTER", "SETSLOT", self.slot, "NODE", owner)

    def run(self) -> None:
        """The whole move."""
        self.begin()
        self.finish()


def _id(node: RedisServer) -> str:
    name = node.command("CLUSTER", "MYID")
    return name.decode() if isinstance(name, bytes) else str(name)
