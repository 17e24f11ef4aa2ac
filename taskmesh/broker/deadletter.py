"""Messages that could not end well: kept with their reason, to be looked at, put back or thrown away.

Two streams: "dead" (failed for good, undecodable, or deadly to its workers) and "parked" (no live worker knows
the task; released by itself when one that does appears).
"""

from __future__ import annotations

import re

from taskmesh.broker.streams import Partition
from taskmesh.codec import decode_message, decode_outcome, encode_message
from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.messages import DeadLetter, Failure, Message

_ENTRY_ID = re.compile(r"\d{1,20}(-\d{1,20})?")


async def dead_letters(partition: Partition, count: int = 100) -> list[DeadLetter]:
    """The oldest ``count`` dead and parked messages of a partition."""
    letters: list[DeadLetter] = []
    for key in (partition.keys.dead, partition.keys.parked):
        rows = await partition.caller.command(partition.keys.tag, "XRANGE", key, "-", "+", "COUNT", count)
        letters += [_read(partition.keys.queue, entry, fields) for entry, fields in rows]
    return letters[:count]


async def dead_letter(partition: Partition, entry: str) -> DeadLetter | None:
    """The dead or parked message of that entry id; None when it is not there.

    Raises:
        ConfigurationError: that is no entry id.
    """
    if not _ENTRY_ID.fullmatch(entry):
        raise ConfigurationError(f"{entry!r} is no entry id: they read like 1718000000000-0")
    for key in (partition.keys.dead, partition.keys.parked):
        rows = await partition.caller.command(partition.keys.tag, "XRANGE", key, entry, entry)
        if rows:
            return _read(partition.keys.queue, *rows[0])
    return None


async def requeue(partition: Partition, letter: DeadLetter) -> bool:
    """Put a dead letter back into its queue, as a first attempt; False when it is no longer there.

    Raises:
        DecodeError: its bytes are not a message.
    """
    if letter.message is None:
        raise DecodeError(f"dead letter {letter.entry} cannot be requeued: {letter.reason}")
    message = letter.message
    fresh = Message(
        message.id,
        message.task,
        message.args,
        message.kwargs,
        message.priority,
        blob_chunks=message.blob_chunks,
        result_ttl_ms=message.result_ttl_ms,
    )
    return await partition.requeue(_key(partition, letter), letter.entry, fresh, encode_message(fresh))


async def discard(partition: Partition, letter: DeadLetter) -> bool:
    """Throw a dead letter away; False when it is no longer there."""
    return await partition.requeue(_key(partition, letter), letter.entry, letter.message, b"")


def _key(partition: Partition, letter: DeadLetter) -> bytes:
    return partition.keys.parked if letter.reason == "no handler" else partition.keys.dead


def _read(queue: str, entry: bytes, flat: list[bytes]) -> DeadLetter:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    raw = fields[b"message"]
    message: Message | None
    try:
        message = decode_message(raw)
    except DecodeError:
        message = None
    failure: Failure | None = None
    if fields[b"outcome"][2:3] == b"i":
        try:
            failure = decode_outcome(fields[b"outcome"]).failure
        except DecodeError:  # the exception's arguments are of a type that is not known here
            failure = None
    return DeadLetter(
        entry.decode(),
        queue,
        fields[b"reason"].decode(),
        message,
        raw,
        int(fields[b"deliveries"]),
        fields[b"worker"].decode(),
        failure,
        int(fields[b"at"]),
    )
