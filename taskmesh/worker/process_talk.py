"""What a worker and its child processes say to each other, over a pair of sockets.

A frame is its length in 8 bytes and msgpack. The worker says ``Setup`` once, then one ``Job`` after the other; the
child answers a Job with ``Started`` when the handler begins and ``Ended`` when it is done, or with ``NotLoaded``.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from taskmesh.settings import MeshSettings

_LENGTH = struct.Struct(">Q")


class Place(NamedTuple):
    """Where a process finds a task: the module's attribute of that qualified name is the Task."""

    module: str
    qualname: str


class Main(msgspec.Struct, frozen=True):
    """How to import what is ``__main__`` in the worker: by its module's name, or from its file."""

    module: str | None
    path: str | None


class Log(msgspec.Struct, frozen=True):
    """The worker's root logger, for the child to have its like on stderr."""

    level: int
    format: str


class Setup(msgspec.Struct, frozen=True):
    """What a child is told first. ``settings`` are the worker's: both speak to the same server."""

    path: list[str]
    argv: list[str]
    main: Main | None
    log: Log | None
    settings: MeshSettings


class Job(msgspec.Struct, frozen=True):
    """One run of one message's handler.

    Attributes:
        message: its wire bytes, unsigned, with its arguments in it.
        queue, deliveries, worker: for its Context.
        keeps_result: whether anybody will look at what the handler returns.
    """

    mesh: str
    place: Place
    message: bytes
    queue: str
    deliveries: int
    worker: str
    keeps_result: bool


class Started(msgspec.Struct, frozen=True, tag=True):
    """The handler begins; its time counts from here."""


class NotLoaded(msgspec.Struct, frozen=True, tag=True):
    """The task could not be imported, and why."""

    reason: str


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The handler is done.

    Attributes:
        outcome: as it goes to the submitter; empty where nobody looks at it.
        succeeded: whether it is a success.
        delay, reason: of a failure, the verdict on it (``taskmesh.worker.outcome``).
    """

    outcome: bytes
    succeeded: bool
    delay: float | None = None
    reason: str = ""


Reply = Started | NotLoaded | Ended


def _rebuild(kind: type, value: Any) -> Any:
    if kind is Path:
        return Path(value)
    raise NotImplementedError(kind)


encode: Callable[[object], bytes] = msgspec.msgpack.Encoder(enc_hook=str).encode
decode_setup: Callable[[bytes], Setup] = msgspec.msgpack.Decoder(Setup, dec_hook=_rebuild).decode
decode_job: Callable[[bytes], Job] = msgspec.msgpack.Decoder(Job).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame.

    Raises:
        asyncio.IncompleteReadError: the other side has ended.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return await reader.readexactly(length)


async def write_frame(writer: asyncio.StreamWriter, message: object) -> None:
    """Send a frame; returns when there is room for another."""
    data = encode(message)
    writer.write(_LENGTH.pack(len(data)))
    writer.write(data)
    await writer.drain()
