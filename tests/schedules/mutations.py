"""Faults that somebody might put into the engine one day. The schedules must find each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from taskmesh.broker.liveness import Steadiness
from taskmesh.worker.fetch import Fetcher
from taskmesh.worker.settle import Settler
from tests.schedules.node import Mutations

LUA: dict[str, Mutations] = {
    "submit without the batch's number": {"submit": [("number <= tonumber(last)", "false")]},
    "a bound that counts only one lane": {
        "submit": [("for lane = 1, 3 do length", "for lane = 1, 1 do length")]
    },
    "a success settled without a look at the pending": {
        "settle": [("row and (kind == 'S'", "(kind == 'S') or row and (kind == 'S'")]
    },
    "a failure that counts from anybody": {
        "settle": [("(kind == 'S' or kind == 'D' or row[2] == worker)", "true")]
    },
    "settle without its number": {"settle": [("redis.call('HGET', KEYS[2], ARGV[9]) == ARGV[4]", "false")]},
    "settle numbers without slots": {
        "settle": [
            (
                "redis.call('HGET', KEYS[2], ARGV[9]) == ARGV[4]",
                "tonumber(redis.call('HGET', KEYS[2], '0') or 0) >= tonumber(ARGV[4])",
            ),
            ("redis.call('HSET', KEYS[2], ARGV[9], ARGV[4])", "redis.call('HSET', KEYS[2], '0', ARGV[4])"),
        ]
    },
    "settle that acknowledges nothing": {"settle": [("if #ended > 0 then", "if #ended > 1 then")]},
    "a retry that is acknowledged and not delayed": {
        "settle": [("redis.call('ZADD', KEYS[3]", "local _ = (KEYS[3]")]
    },
    "claim without another look": {"claim": [("seen ~= ARGV[4] or ", "")]},
    "claim that strikes off too early": {"claim": [("empty = false", "empty = true")]},
    "hand back that counts": {"hand_back": [("math.max(0, row[4] - 1)", "row[4]")]},
    "hand back without a look at the owner": {"hand_back": [("row and row[2] == ARGV[3]", "row")]},
    "leave without a look at the pending": {"leave": [("ARGV[3]) > 0 then", "ARGV[3]) > 99 then")]},
    "cancel under a worker that holds it": {"cancel": [("pending.err or #pending == 0", "true")]},
    "promote that leaves the message delayed": {
        "promote": [("if #due > 0 then redis.call('ZREM', KEYS[4], unpack(due)) end", "")]
    },
    "a heartbeat that revives the dead": {
        "heartbeat": [("if not seen or seen == '1' then return false end", "")]
    },
    "no sweep": {"sweep": [("fields.pending > 0", "false")]},
}


async def _nothing_async(*_: Any, **__: Any) -> None:
    pass


def _always(*_: Any) -> bool:
    return True


async def _send_once(self: Settler, calls: list[Any]) -> int:
    link = self._source.partition.caller.server.link(self._source.keys.tag)
    try:
        await link.call_many([call.command for call in calls])
    except Exception:
        pass
    return 0


ENGINE: dict[str, tuple[Any, str, Any]] = {
    "observers who trust their eyes at once": (Steadiness, "is_steady", _always),
    "deliveries that were lost on the way are not adopted": (Fetcher, "_adopt", _nothing_async),
    "a settle whose reply was lost is not repeated": (Settler, "_send", _send_once),
}


@contextmanager
def in_engine(name: str) -> Iterator[None]:
    """Put one of ``ENGINE`` into the engine."""
    owner, attribute, replacement = ENGINE[name]
    with patch.object(owner, attribute, replacement):
        yield
