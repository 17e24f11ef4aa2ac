"""A checkpoint as files: what a mirror holds, and what an export writes.

    model.safetensors   the parameters and buffers under their names, for ``safetensors.torch.load_file``
    state.safetensors   the other tensors (``optimizer/state/0/exp_avg``, ``memory/3``), and the rest of the state as
                        bytes
    manifest.json       the manifest with all digests, and the index; written last: without it the rest is nothing

Safetensors is eight bytes of length, a JSON head, and the tensors without a gap; the largest types come first, so that
each lies where its type wants it. It is written here as it is streamed out, without a copy of it all.
"""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from taskmesh.broker.chunks import CHUNK_BYTES, split
from taskmesh.checkpoints.manifest import Manifest, digest_of
from taskmesh.checkpoints.tables import TYPES, Entry, decode_index, memories_of, memory_name
from taskmesh.errors import CheckpointError
from taskmesh.keys import RunKeys

MODEL, STATE, MANIFEST = "model.safetensors", "state.safetensors", "manifest.json"
FORMAT = 1
PARTS = ("parameters", "tensors", "state", "index")
_STATE_NAME = "taskmesh/state"
_LENGTH = struct.Struct("<Q")


class Record(msgspec.Struct, frozen=True):
    """What ``manifest.json`` says."""

    mesh: str
    run: str
    manifest: Manifest
    index: str


class _Sealed(msgspec.Struct, frozen=True):
    """All of ``manifest.json``; the digest is that of the record's bytes as they stand there."""

    format: int
    digest: str
    record: msgspec.Raw


class Readable(Protocol):
    """An open file."""

    def read(self, size: int, /) -> bytes: ...


class _Tensor(NamedTuple):
    """One tensor of a file, and where its bytes lie in the checkpoint."""

    name: str
    entry: Entry
    part: str


def write_files(
    mesh: str, run: str, manifest: Manifest, parts: Mapping[str, memoryview]
) -> Iterator[tuple[str, Iterator[bytes | memoryview]]]:
    """The files of a checkpoint in the order in which they must be written, each as the pieces of its content.

    Raises:
        CheckpointError: it has no index, as those of older releases.
    """
    if any(name not in parts for name in PARTS):
        raise CheckpointError(
            f"version {manifest.version} of run {run!r} was kept by an older release, without an index: "
            "it has no files until the run has kept another version"
        )
    for name, tensors in _contents(parts).items():
        yield name, _pieces(tensors, parts)
    record = Record(mesh, run, manifest, bytes(parts["index"]).decode())
    text = msgspec.json.format(msgspec.json.encode(record))
    yield MANIFEST, iter([msgspec.json.encode(_Sealed(FORMAT, digest_of(text).hex(), msgspec.Raw(text)))])


def write_folder(folder: Path, keys: RunKeys, manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
    """Write the files into a new folder, which is there when all of them are.

    Raises:
        CheckpointError: the folder is there already, or cannot be written.
    """
    if folder.exists():
        raise CheckpointError(f"{folder} is there already")
    draft = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for name, pieces in write_files(keys.mesh, keys.run, manifest, parts):
            with (draft / name).open("wb") as file:
                file.writelines(pieces)
        draft.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from None


def read_record(data: bytes) -> Record:
    """Read ``manifest.json``.

    Raises:
        CheckpointError: the bytes are not one, or of another format.
    """
    try:
        sealed = msgspec.json.decode(data, type=_Sealed)
        if sealed.format != FORMAT:
            raise CheckpointError(f"{MANIFEST} has format {sealed.format}; this side reads {FORMAT}")
        if digest_of(bytes(sealed.record)).hex() != sealed.digest:
            raise CheckpointError(f"{MANIFEST} is damaged: it is not what was written")
        record = msgspec.json.decode(sealed.record, type=Record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{MANIFEST} is damaged: {error}") from None
    for name in _parts_of(record.manifest):
        part = record.manifest.parts.get(name)
        if part is None or part.size_bytes < 0 or len(part.digests) != -(-part.size_bytes // CHUNK_BYTES):
            raise CheckpointError(f"{MANIFEST} is damaged: its {name} cannot be")
    return record


def read_files(record: Record, open_file: Callable[[str], Readable]) -> dict[str, memoryview]:
    """The parts of a checkpoint from its files, each chunk held against its digest.

    Raises:
        CheckpointError: they are not what was written.
        OSError: a file cannot be read.
    """
    parts = {
        name: memoryview(bytearray(record.manifest.parts[name].size_bytes))
        for name in _parts_of(record.manifest)
        if name != "index"
    }
    parts["index"] = memoryview(record.index.encode())
    _verify(record.manifest, {"index": parts["index"]})
    for name, tensors in _contents(parts).items():
        file = open_file(name)
        head = _head(tensors)
        if file.read(len(head)) != head:
            raise CheckpointError(f"{name} of version {record.manifest.version} is damaged")
        for tensor in tensors:
            _fill(file, parts[tensor.part][tensor.entry.at : tensor.entry.at + tensor.entry.size_bytes], name)
    _verify(record.manifest, parts)
    return parts


def _contents(parts: Mapping[str, memoryview]) -> dict[str, list[_Tensor]]:
    """The tensors of each file."""
    index = decode_index(parts["index"], len(parts["parameters"]), len(parts["tensors"]))
    rest = Entry((_STATE_NAME,), "uint8", (len(parts["state"]),), 0)
    state = [(entry, "tensors") for entry in index.tensors]
    for shard, memory in memories_of(parts).items():
        state.append((Entry(("memory", shard), "float32", (len(memory) // 4,), 0), memory_name(shard)))
    return {
        MODEL: _named([(entry, "parameters") for entry in index.parameters]),
        STATE: [*_named(state), _Tensor(_STATE_NAME, rest, "state")],
    }


def _named(entries: Sequence[tuple[Entry, str]]) -> list[_Tensor]:
    """Largest types first, under names that differ."""
    tensors: dict[str, _Tensor] = {}
    for entry, part in sorted(entries, key=lambda found: -TYPES[found[0].dtype].size_bytes):
        name = entry.name
        while name in tensors or name == _STATE_NAME:
            name += "'"
        tensors[name] = _Tensor(name, entry, part)
    return list(tensors.values())


def _parts_of(manifest: Manifest) -> list[str]:
    """The names of the parts that files are made of."""
    return [*PARTS, *map(memory_name, memories_of(manifest.parts))]


def _head(tensors: Sequence[_Tensor]) -> bytes:
    described: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, entry, _ in tensors:
        end = at + entry.size_bytes
        described[name] = {
            "dtype": TYPES[entry.dtype].code,
            "shape": entry.shape,
            "data_offsets": (at, end),
        }
        at = end
    text = json.dumps(described, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _pieces(tensors: Sequence[_Tensor], parts: Mapping[str, memoryview]) -> Iterator[bytes | memoryview]:
    yield _head(tensors)
    for _, entry, part in tensors:
        yield parts[part][entry.at : entry.at + entry.size_bytes]


def _fill(file: Readable, target: memoryview, name: str) -> None:
    at = 0
    while at < len(target):
        data = file.read(len(target) - at)
        if not data:
            raise CheckpointError(f"{name} is cut short")
        target[at : at + len(data)] = data
        at += len(data)


def _verify(manifest: Manifest, parts: Mapping[str, memoryview]) -> None:
    for name, value in parts.items():
        part = manifest.parts[name]
        if len(value) != part.size_bytes or tuple(map(digest_of, split(value))) != part.digests:
            raise CheckpointError(f"version {manifest.version}: its {name} are not what was written")
