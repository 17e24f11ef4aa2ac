"""Payloads over the inline limit: chunks of about 1 MiB beside the message, in its slot.

Arguments are uploaded with a short TTL, made persistent by the submit script and unlinked by the settle script.
Results carry the TTL of their record.
"""

from __future__ import annotations

from taskmesh.broker.chunks import call_many
from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerError, DecodeError
from taskmesh.settings import MIB

CHUNK_BYTES = MIB
UPLOAD_TTL_MS = 600_000


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def result_kind(run: str) -> str:
    """The kind of blob that a run's result is; "" is a run that has no name."""
    return f"result-{run}" if run else "result"


def chunk_keys(partition: Partition, message_id: str, kind: str, chunks: int) -> list[bytes]:
    """The keys of a blob; ``kind`` is "args" or what ``result_kind`` says."""
    return [partition.keys.blob(message_id, kind, chunk) for chunk in range(chunks)]


async def upload(
    partition: Partition, message_id: str, kind: str, data: bytes, ttl_ms: int = UPLOAD_TTL_MS
) -> int:
    """Write the chunks of a blob and return how many there are.

    Raises:
        BrokerFull: the server has no room; what was written goes with its TTL.
    """
    keys = chunk_keys(partition, message_id, kind, chunk_count(len(data)))
    view = memoryview(data)
    for chunk, key in enumerate(keys):
        piece = bytes(view[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES])
        await partition.caller.command(partition.keys.tag, "SET", key, piece, "PX", ttl_ms)
    return len(keys)


async def download(partition: Partition, message_id: str, kind: str, chunks: int) -> bytes:
    """Read a blob, however often the server is away for a while. No more of a key is read than a chunk can have.

    Raises:
        DecodeError: a chunk is gone, or is none.
        BrokerUnavailable: the server stayed away.
    """
    keys = chunk_keys(partition, message_id, kind, chunks)
    commands = [("GETRANGE", key, 0, CHUNK_BYTES) for key in keys]
    try:
        replies = await call_many(partition.caller, partition.keys.tag, commands)
    except BrokerError as error:
        if "WRONGTYPE" in str(error):
            raise DecodeError(f"a chunk of the {kind} of {message_id} is no string") from None
        raise
    for reply in replies:
        if not reply:
            raise DecodeError(f"a chunk of the {kind} of {message_id} is gone")
        if len(reply) > CHUNK_BYTES:
            raise DecodeError(f"a chunk of the {kind} of {message_id} has more than {CHUNK_BYTES:,} bytes")
    return b"".join(replies)
