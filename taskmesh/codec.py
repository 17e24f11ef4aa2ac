"""Messages and outcomes to bytes and back.

A message is a fixed head that scripts read without unpacking anything, then msgpack::

    byte 0       wire version: 1, or 2 where a signature stands at the end (``taskmesh.signing`` takes it off)
    byte 1       lane: "0" high, "1" normal, "2" low
    bytes 2-21   message id, ASCII
    bytes 22-    msgpack array [task, args, kwargs, extras]; trailing empty members are left out

``extras`` is a map with the names of ``Message``'s fields, defaults left out. An outcome is::

    byte 0       wire version, as above
    byte 1       status: "S" succeeded, "F" failed, "C" cancelled, "X" expired
    byte 2       "i" the body follows, "b" the body lies in blob chunks: their count follows as msgpack, or
                 [count, digest of the body] in what is signed
    bytes 3-     msgpack: the value, or [type, message, traceback, args] of a failure

Beside msgpack's own types, values of everyday types travel as msgpack extensions and arrive as themselves.
Dataclasses and enums travel as maps and values and are rebuilt from the handler's annotations: nothing is
imported because a message names it.

Whatever the bytes, decoding them raises DecodeError or yields a value, in memory that is a small multiple of theirs:
lengths that the bytes cannot fill are refused before anything is made for them, and so is what is nested too deeply.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import importlib.metadata
import re
import threading
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgpack
import msgspec

from taskmesh.errors import DecodeError
from taskmesh.messages import Failure, Message, Outcome, Priority, Status

WIRE_VERSION = 1
SIGNED_VERSION = 2
HEAD_BYTES = 22
MAX_BLOB_CHUNKS = 4096  # more than the scripts can unlink in one go is an invention
MAX_NESTED_EXTENSIONS = 16
_UNCHECKED_BYTES = 1024
_MAX_NUMBER = 2**53
_RUN = re.compile("[0-9a-z]{0,16}")
_VERSION_BYTE = bytes([WIRE_VERSION])
_SIGNED_BYTE = bytes([SIGNED_VERSION])
_HEADS = {lane: _VERSION_BYTE + str(lane.value).encode() for lane in Priority}
_LANES = {head: lane for lane, head in _HEADS.items()}
_LANE_BYTES = tuple(str(lane.value).encode() for lane in Priority)
_MOST_VERSIONS = 31  # what is above begins text
_STATUS_BYTES = {
    Status.SUCCEEDED: b"S",
    Status.FAILED: b"F",
    Status.CANCELLED: b"C",
    Status.EXPIRED: b"X",
}
_STATUSES = {code: status for status, code in _STATUS_BYTES.items()}


class WireType(NamedTuple):
    """How values of one class travel inside a msgpack extension of one code."""

    code: int
    cls: type
    encode: Callable[[Any], bytes]
    decode: Callable[[bytes], Any]


_by_class: dict[type, WireType] = {}
_by_code: dict[int, WireType] = {}
# Codes of types whose packages are optional: the entry point of that name in the group below registers them.
_OPTIONAL_CODES = {32: "numpy", 33: "torch"}
_ENTRY_POINTS = "taskmesh.wire_types"


def register(wire_type: WireType) -> None:
    """Let values of a class travel. Codes 0 to 31 are taskmesh's own, 64 and above are free for users."""
    _by_class[wire_type.cls] = wire_type
    _by_code[wire_type.code] = wire_type


def _load_optional(package: str) -> bool:
    for entry_point in importlib.metadata.entry_points(group=_ENTRY_POINTS, name=package):
        entry_point.load()()
        return True
    return False


def _to_wire(value: Any) -> Any:
    """msgpack's hook for what it does not know."""
    for cls in type(value).__mro__:
        wire_type = _by_class.get(cls)
        if wire_type is not None:
            return msgpack.ExtType(wire_type.code, wire_type.encode(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return _members(value)
    if isinstance(value, enum.Enum):
        return value.value
    package = type(value).__module__.partition(".")[0]
    loaded = package in _OPTIONAL_CODES.values() and _load_optional(package)
    if loaded and any(cls in _by_class for cls in type(value).__mro__):
        return _to_wire(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__} cannot travel")


def _members(value: msgspec.Struct) -> dict[str, Any]:
    """A Struct as msgspec itself would write it: encoded names, and its tag."""
    names = zip(value.__struct_encode_fields__, value.__struct_fields__, strict=True)
    members = {encoded: getattr(value, name) for encoded, name in names}
    config = value.__struct_config__
    return {config.tag_field: config.tag, **members} if config.tag_field is not None else members


def _from_wire(code: int, data: bytes) -> Any:
    wire_type = _by_code.get(code)
    if wire_type is None:
        package = _OPTIONAL_CODES.get(code)
        if package is None or not _load_optional(package):
            raise DecodeError(f"a value of wire type {code} ({package or 'unknown'}) cannot be read here")
        wire_type = _by_code[code]
    try:
        return wire_type.decode(data)
    except DecodeError:
        raise
    except Exception as error:
        # Without the error's text: it may show the value, which may be nobody's business.
        raise DecodeError(f"a value of wire type {code} is damaged ({type(error).__name__})") from None


class _Nesting(threading.local):
    """How deep this thread is inside extensions that hold values."""

    depth = 0


_nesting = _Nesting()


class _NestedTooDeeply(DecodeError, ValueError):
    """On the way in and on the way out."""


def _nested(call: Callable[[Any], Any], value: Any) -> Any:
    """Pack or unpack what an extension holds. Each level has a copy of all below it, so they are few."""
    if _nesting.depth == MAX_NESTED_EXTENSIONS:
        raise _NestedTooDeeply(f"sets are nested more than {MAX_NESTED_EXTENSIONS} deep")
    _nesting.depth += 1
    try:
        return call(value)
    finally:
        _nesting.depth -= 1


def pack_value(value: Any) -> bytes:
    """Encode one value.

    Raises:
        TypeError, ValueError, OverflowError: it cannot travel.
    """
    # A packer cannot be entered twice, neither by another thread nor by a value that encodes another: each use
    # takes one out, and one that failed is not put back.
    try:
        packer = _packers.pop()
    except IndexError:
        packer = msgpack.Packer(default=_to_wire)
    packed: bytes = packer.pack(value)
    _packers.append(packer)
    return packed


_packers: list[msgpack.Packer] = []


def unpack_value(data: bytes) -> Any:
    """Decode one value.

    Raises:
        DecodeError: the bytes are not one.
    """
    try:
        if len(data) > _UNCHECKED_BYTES:
            _check_lengths(data)
        return msgpack.unpackb(data, ext_hook=_from_wire, strict_map_key=False)
    except DecodeError:
        raise
    except (RecursionError, msgpack.StackError):
        raise DecodeError("a value is nested too deeply") from None
    except Exception as error:
        raise DecodeError(f"not a value: {str(error) or type(error).__name__}") from error


# msgpack makes a list of the length that its head claims before it sees the members. Claims within claims let a
# message of some kilobytes take gigabytes; a few bytes cannot do harm. msgspec's skipping allocates nothing.
_check_lengths: Callable[[bytes], object] = msgspec.msgpack.Decoder(msgspec.Raw).decode


def encode_call(
    message_id: str,
    priority: Priority,
    task: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    extras: dict[str, Any],
) -> bytes:
    """A message's bytes; ``extras`` holds what differs from ``Message``'s defaults."""
    if extras:
        body: tuple[Any, ...] = (task, args, kwargs, extras)
    elif kwargs:
        body = (task, args, kwargs)
    else:
        body = (task, args)
    return _HEADS[priority] + message_id.encode() + pack_value(body)


def encode_message(message: Message) -> bytes:
    """The same from a ``Message``."""
    extras: dict[str, Any] = {}
    if message.attempt != 1:
        extras["attempt"] = message.attempt
    if message.expires_at_ms:
        extras["expires_at_ms"] = message.expires_at_ms
    if message.blob_chunks:
        extras["blob_chunks"] = message.blob_chunks
    if message.result_ttl_ms >= 0:
        extras["result_ttl_ms"] = message.result_ttl_ms
    if message.blob_digest:
        extras["blob_digest"] = message.blob_digest
    if message.misfits:
        extras["misfits"] = message.misfits
        extras["unfit"] = message.unfit
    return encode_call(message.id, message.priority, message.task, message.args, message.kwargs, extras)


def decode_message(data: bytes) -> Message:
    """Read a message.

    Raises:
        DecodeError: the bytes are not a message, or of another version.
    """
    lane = _LANES.get(data[:2])
    if lane is None or len(data) < HEAD_BYTES:
        raise DecodeError(_version_trouble(data, "message") or "the head of the message is damaged")
    body = unpack_value(data[HEAD_BYTES:])
    if type(body) is not list or len(body) < 2 or type(body[0]) is not str or type(body[1]) is not list:
        raise DecodeError("the body of the message is damaged")
    try:
        message_id = data[2:HEAD_BYTES].decode("ascii")
    except UnicodeDecodeError:
        raise DecodeError("the message id is damaged") from None
    if len(body) == 2:
        return Message(message_id, body[0], tuple(body[1]), priority=lane)
    kwargs, extras = body[2], body[3] if len(body) > 3 else {}
    if type(kwargs) is not dict or type(extras) is not dict:
        raise DecodeError("the body of the message is damaged")
    if not all(type(name) is str for name in kwargs):
        raise DecodeError("the body of the message has members of the wrong type")
    return Message(message_id, body[0], tuple(body[1]), kwargs, lane, **_read_extras(extras))


def _version_trouble(data: bytes, kind: str) -> str | None:
    """What to say of a version that is not read here; None when it is another trouble."""
    if data[:1] == _VERSION_BYTE:
        return None
    if data[:1] == _SIGNED_BYTE:
        return f"the {kind} is signed, and this Mesh has no keys to check it with (MeshSettings.signing_keys)"
    return f"wire version {data[0] if data else 'missing'}; this side reads {WIRE_VERSION}"


def _read_extras(extras: dict[Any, Any]) -> dict[str, Any]:
    """The members that are known here, each within its bounds: the server must be able to act on them."""
    known: dict[str, Any] = {}
    for name, (least, most) in _EXTRAS.items():
        value = extras.get(name)
        if value is None:
            continue
        if type(value) is not int or not least <= value <= most:
            raise DecodeError(f"the message's {name} is damaged")
        known[name] = value
    digest = extras.get("blob_digest")
    if digest is not None:
        if type(digest) is not bytes:
            raise DecodeError("the message's blob_digest is damaged")
        known["blob_digest"] = digest
    return known


def version_of(data: bytes) -> int | None:
    """The wire version of what has the head of a message, one that is not known here included; None of other bytes."""
    if len(data) < HEAD_BYTES or not 0 < data[0] <= _MOST_VERSIONS or data[1:2] not in _LANE_BYTES:
        return None
    return data[0] if data[2:HEAD_BYTES].isalnum() else None


def peek_task(data: bytes) -> str | None:
    """The task's name in a message whose values need not be readable here; None where there is no such thing."""
    if data[:2] not in _LANES:
        return None
    try:
        body = data[HEAD_BYTES:]
        if len(body) > _UNCHECKED_BYTES:
            _check_lengths(body)
        body = msgpack.unpackb(body, strict_map_key=False)
    except Exception:
        return None
    return body[0] if type(body) is list and body and type(body[0]) is str else None


_EXTRAS = {
    "attempt": (1, _MAX_NUMBER),
    "expires_at_ms": (0, _MAX_NUMBER),
    "blob_chunks": (0, MAX_BLOB_CHUNKS),
    "result_ttl_ms": (-1, _MAX_NUMBER),
    "misfits": (0, _MAX_NUMBER),
    "unfit": (0, 2**32 - 1),
}


def encode_outcome(outcome: Outcome) -> bytes:
    """An outcome's bytes, body inline.

    Raises:
        TypeError, ValueError, OverflowError: the value cannot travel.
    """
    head = _VERSION_BYTE + _STATUS_BYTES[outcome.status] + b"i"
    failure = outcome.failure
    if failure is None:
        return head + pack_value(outcome.value)
    return head + pack_value((failure.type, failure.message, failure.traceback, failure.args))


def encode_success(value: Any) -> bytes:
    """``encode_outcome`` for the common case."""
    return b"\x01Si" + pack_value(value)


class BlobClaim(NamedTuple):
    """Where the body of an outcome lies.

    Attributes:
        chunks: in so many blob chunks; 0 when it is inline.
        digest: the body's, in what is signed.
        run: names the run that wrote it: what another run writes later, and nobody counts, lies elsewhere.
    """

    chunks: int
    digest: bytes = b""
    run: str = ""


def encode_blob_outcome(status: Status, claim: BlobClaim) -> bytes:
    """An outcome whose body lies in blob chunks."""
    return _VERSION_BYTE + _STATUS_BYTES[status] + b"b" + pack_value(tuple(claim))


def blob_of(data: bytes) -> BlobClaim:
    """Where the body of an outcome lies.

    Raises:
        DecodeError: the bytes do not say.
    """
    if data[2:3] != b"b":
        return BlobClaim(0)
    told = unpack_value(data[3:])
    parts = told if type(told) is list else [told]
    if not 1 <= len(parts) <= 3 or [type(part) for part in parts] != [int, bytes, str][: len(parts)]:
        raise DecodeError("the outcome's count of blob chunks is damaged")
    claim = BlobClaim(*parts)
    if not 1 <= claim.chunks <= MAX_BLOB_CHUNKS or not _RUN.fullmatch(claim.run):
        raise DecodeError("the outcome's count of blob chunks is damaged")
    return claim


def decode_outcome(data: bytes, body: bytes | None = None) -> Outcome:
    """Read an outcome; ``body`` is the content of its blob where there is one.

    Raises:
        DecodeError: the bytes are not an outcome.
    """
    status = _STATUSES.get(data[1:2])
    if data[:1] != _VERSION_BYTE or status is None:
        raise DecodeError(_version_trouble(data, "outcome") or "the head of the outcome is damaged")
    content = unpack_value(data[3:] if body is None else body)
    if status is not Status.FAILED:
        return Outcome(status, content)
    if type(content) is list and len(content) == 4:
        kind, message, traceback, args = content
        if type(kind) is type(message) is type(traceback) is str and type(args) is list:
            return Outcome(status, failure=Failure(kind, message, traceback, tuple(args)))
    raise DecodeError("the outcome's failure is damaged")


def _register_everyday_types() -> None:
    def text(code: int, cls: type, encode: Callable[[Any], str], decode: Callable[[str], Any]) -> None:
        register(
            WireType(code, cls, lambda value: encode(value).encode(), lambda data: decode(data.decode()))
        )

    text(1, datetime.datetime, lambda v: v.isoformat(), datetime.datetime.fromisoformat)
    text(2, datetime.date, lambda v: v.isoformat(), datetime.date.fromisoformat)
    text(3, datetime.time, lambda v: v.isoformat(), datetime.time.fromisoformat)
    text(6, decimal.Decimal, str, decimal.Decimal)

    def inner(code: int, cls: type, encode: Callable[[Any], Any], decode: Callable[[Any], Any]) -> None:
        register(
            WireType(
                code,
                cls,
                lambda value: _nested(pack_value, encode(value)),
                lambda data: decode(_nested(unpack_value, data)),
            )
        )

    inner(
        4, datetime.timedelta, lambda v: (v.days, v.seconds, v.microseconds), lambda v: datetime.timedelta(*v)
    )
    register(WireType(5, uuid.UUID, lambda v: v.bytes, lambda data: uuid.UUID(bytes=data)))
    inner(7, set, list, set)
    inner(8, frozenset, list, frozenset)
    inner(9, complex, lambda v: (v.real, v.imag), lambda v: complex(*v))


_register_everyday_types()
