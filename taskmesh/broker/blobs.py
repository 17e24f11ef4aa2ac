"""Payloads over the inline limit: chunks of about 1 MiB beside the message, in its slot.

Arguments are uploaded with a short TTL, made persistent by the submit script and unlinked by the settle script.
Results carry the TTL of their record.
"""

from __future__ import annotations

from taskmesh.broker.streams import Partition
from taskmesh.errors import BrokerError, DecodeError
from taskmesh.settings import MIB

CHUNK_BYTES = MIB
UPLOAD_TTL_MS = 600_000


def chunk_count(size_bytes: int) -> int:
    return -(-size_bytes // CHUNK_BYTES)


def chunk_keys(partition: Partition, message_id: str, kind: str, chunks: int) -> list[bytes]:
    """The keys of a blob; ``kind`` is "args" or "result"."""
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
    """Read a blob.

    Raises:
        DecodeError: a chunk is gone.
    """
    keys = chunk_keys(partition, message_id, kind, chunks)
    replies = await partition.caller.server.link(partition.keys.tag).call_many([("GET", key) for key in keys])
    for reply in replies:
        if isinstance(reply, BrokerError):
            raise reply
        if reply is None:
            raise DecodeError(f"a chunk of the {kind} of {message_id} is gone")
    return b"".join(replies)
