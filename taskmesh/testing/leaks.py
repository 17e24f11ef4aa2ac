"""Which keys a test left behind. It walks the whole keyspace, which only a private test server may be asked for."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import redis

# What may stay for a while: it has a time to live, or belongs to a queue that exists.
LASTING = (":tasks:", ":workers", ":known", ":control")


class KeyLeaks:
    """The keys that appear between entering and ``found``.

    Used as a context manager it fails at the end if any key was left that lasts for ever and belongs to a message:
    streams, leases and the control stream of a queue stay, and so does what has a time to live.
    """

    def __init__(self, *urls: str) -> None:
        self._urls = urls
        self._before: set[str] = set()

    def _keys(self) -> dict[str, int]:
        """Every key, and its time to live in ms (-1: for ever)."""
        keys: dict[str, int] = {}
        for url in self._urls:
            with redis.Redis.from_url(url) as client:
                for key in client.scan_iter(count=1000):
                    keys[key.decode("utf-8", "replace")] = int(client.pttl(key))
        return keys

    def found(self) -> set[str]:
        """Keys that were not there before and that nothing will remove."""
        return {
            key
            for key, ttl_ms in self._keys().items()
            if ttl_ms == -1 and key not in self._before and not any(part in key for part in LASTING)
        }

    def __enter__(self) -> Self:
        self._before = set(self._keys())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and (found := self.found()):
            raise AssertionError(f"keys were left behind: {sorted(found)}")
