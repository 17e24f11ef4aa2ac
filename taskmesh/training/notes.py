"""Word of pieces of gradients that are there, so that they are fetched while the rest is still computed.

Notes lie in a short stream beside the pieces, on the server without AOF. Nothing depends on them: what was not heard
of in time is fetched when the shard's result names it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from taskmesh.broker import chunks
from taskmesh.broker.caller import Caller, pause_before
from taskmesh.errors import BrokerError
from taskmesh.keys import tag_of

log = logging.getLogger("taskmesh.training")
KEPT = 1000
AT_ONCE = 100
BLOCK_MS = 5000
LASTS_MS = 600_000
MARGIN = 5.0


class Note(NamedTuple):
    """Pieces of one attempt at a shard, by their places."""

    version: int
    shard: int
    attempt: str
    places: tuple[int, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Note).decode


def write(key: bytes, note: Note) -> Sequence[bytes]:
    """The command that tells of pieces."""
    return (b"XADD", key, b"MAXLEN", b"~", b"%d" % KEPT, b"*", b"n", _encode(note))


async def listen(bulk: Caller, key: bytes, hear: Callable[[Note], None]) -> None:
    """Hear of every note from now on, for ever."""
    link = bulk.server.dedicated(tag_of(key))
    last: bytes = b"$"
    failures = 0
    try:
        while True:
            keep = ("PEXPIRE", key, LASTS_MS)
            read = ("XREAD", "COUNT", AT_ONCE, "BLOCK", BLOCK_MS, "STREAMS", key, last)
            try:
                reply = (await link.call_many([keep, read], BLOCK_MS / 1000 + MARGIN))[1]
                if isinstance(reply, BrokerError):
                    raise reply
            except BrokerError as error:
                log.debug("notes of gradients: %s", error)
                await asyncio.sleep(pause_before(failures))
                failures += 1
                continue
            failures = 0
            for entry_id, fields in reply[0][1] if reply else ():
                last = entry_id
                try:
                    hear(_decode(fields[1]))
                except (msgspec.DecodeError, IndexError):
                    log.debug("a note that nobody can read")
    finally:
        await link.close()
        with contextlib.suppress(BrokerError):
            await chunks.unlink(bulk, [key])
