"""The demo's books: was anything lost, settled twice, or left behind?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field

from taskmesh.app.client import Client
from taskmesh.broker.link import Link
from taskmesh.events import Committed, Event, RolledBack, ShardRefused, Submitted


@dataclass(slots=True)
class Books:
    """An observer of the master's process that keeps count."""

    submitted: int = 0
    steps: int = 0
    uplink_bytes: int = 0
    dense_bytes: int = 0
    refused: list[ShardRefused] = field(default_factory=list)
    rollbacks: list[RolledBack] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Return when what was noted fulfils a condition."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def on_event(self, event: Event) -> None:
        match event:
            case Submitted():
                self.submitted += event.messages
            case Committed():
                self.steps = event.step
                self.uplink_bytes += event.uplink_bytes
                self.dense_bytes += event.dense_bytes
            case ShardRefused():
                self.refused.append(event)
            case RolledBack():
                self.rollbacks.append(event)
        self._changed.set()

    async def outcomes_missing(self, client: Client, patience: float = 5.0) -> tuple[int, int]:
        """Tasks without an outcome, and outcomes that came twice.

        A settle pushes its outcome once: every task has one push, or something is wrong.
        """
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + patience
        while client.outcomes - client.repeats < self.submitted and loop.time() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        return max(0, self.submitted - (client.outcomes - client.repeats)), client.repeats


async def keys_left(links: Iterable[Link], wanted: Container[bytes]) -> list[str]:
    """Keys that nothing will remove: without a TTL, and not of those that are wanted; gradients in any case.

    It walks the keyspace, which is fit for the demo's own small servers only.
    """
    left: list[str] = []
    for link in links:
        cursor = b"0"
        while True:
            cursor, keys = await link.call("SCAN", cursor, "COUNT", 1000)
            ttls = await link.call_many([("PTTL", key) for key in keys]) if keys else []
            for key, ttl in zip(keys, ttls, strict=True):
                if b":gradient:" in key or (ttl == -1 and key not in wanted):
                    left.append(key.decode())
            if cursor == b"0":
                break
    return sorted(left)
