"""Messages that could not end well: kept with their reason, to be looked at, put back or thrown away.

Two streams: "dead" (failed for good, undecodable, or deadly to its workers) and "parked" (no live worker knows
the task; released by itself when one that does appears).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from taskmesh.broker.streams import Partition
from taskmesh.codec import decode_message, decode_outcome, encode_message
from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.messages import DeadLetter, Failure, Message
from taskmesh.signing import Signer

_ENTRY_ID = re.compile(r"\d{1,20}(-\d{1,20})?")


async def dead_letters(partition: Partition, count: int = 100) -> list[DeadLetter]:
    """The oldest ``count`` dead and parked messages of a partition."""
    letters: list[DeadLetter] = []
    for key in (partition.keys.dead, partition.keys.parked):
        rows = await partition.caller.command(partition.keys.tag, "XRANGE", key, "-", "+", "COUNT", count)
        letters += [read(partition, entry, fields) for entry, fields in rows]
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
            return read(partition, *rows[0])
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
        blob_digest=message.blob_digest,
    )
    data = encode_message(fresh)
    if partition.signer is not None:
        data = partition.signer.sign(data)
    return await partition.requeue(_key(partition, letter), letter.entry, fresh, data)


async def discard(partition: Partition, letter: DeadLetter) -> bool:
    """Throw a dead letter away; False when it is no longer there."""
    return await partition.requeue(_key(partition, letter), letter.entry, letter.message, b"")


def _key(partition: Partition, letter: DeadLetter) -> bytes:
    return partition.keys.parked if letter.reason == "no handler" else partition.keys.dead


def read(partition: Partition, entry: bytes, flat: Sequence[bytes]) -> DeadLetter:
    """A dead letter from its stream entry; whatever of it cannot be read is left out, never raised."""
    fields = dict(zip(flat[::2], flat[1::2], strict=False))
    raw = fields.get(b"message", b"")
    signer, keys = partition.signer, partition.keys
    message = _message(signer, raw)
    return DeadLetter(
        entry.decode(),
        keys.queue,
        _text(fields, b"reason"),
        message,
        raw,
        _number(fields, b"deliveries"),
        _text(fields, b"worker"),
        None if message is None else _failure(signer, message.id, fields.get(b"outcome", b"")),
        _number(fields, b"at"),
        keys.partition,
    )


def _message(signer: Signer | None, raw: bytes) -> Message | None:
    try:
        return decode_message(raw if signer is None else signer.read(raw))
    except DecodeError:
        return None


def _failure(signer: Signer | None, message_id: str, outcome: bytes) -> Failure | None:
    if outcome[2:3] != b"i":
        return None
    try:
        return decode_outcome(outcome if signer is None else signer.read_outcome(message_id, outcome)).failure
    except DecodeError:  # the exception's arguments are of a type that is not known here, say
        return None


def _text(fields: Mapping[bytes, bytes], name: bytes) -> str:
    return fields.get(name, b"").decode("utf-8", "replace")


def _number(fields: Mapping[bytes, bytes], name: bytes) -> int:
    text = fields.get(name, b"")
    return int(text) if text.isdigit() and len(text) < 20 else 0
