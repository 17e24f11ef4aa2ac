"""A checkpoint as safetensors and JSON: what others read of it, and what comes back."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from pathlib import Path

import pytest

from taskmesh.broker.chunks import split
from taskmesh.checkpoints.files import (
    MANIFEST,
    MODEL,
    STATE,
    read_files,
    read_record,
    write_files,
    write_folder,
)
from taskmesh.checkpoints.manifest import Manifest, Part, digest_of
from taskmesh.checkpoints.tables import Entry, Index, decode_index, encode_index
from taskmesh.errors import CheckpointError
from taskmesh.keys import RunKeys

RUN = RunKeys("shop", "digits")
INDEX = Index(
    (
        Entry(("0.weight",), "float32", (2, 3), 0),
        Entry(("0.bias",), "float32", (1,), 24),
        Entry(("1.seen",), "int64", (), 32),  # behind four bytes of padding
    ),
    (
        Entry(("optimizer", "state", 0, "exp_avg"), "float32", (2, 3), 0),
        Entry(("optimizer", "state", 0, "mask"), "bool", (3,), 24),
        Entry(("optimizer/state", 0, "mask"), "bool", (0, 3), 27),
    ),
)
PARTS: dict[str, memoryview] = {
    "parameters": memoryview(bytes(range(28)) + bytes(4) + bytes(range(8))),
    "tensors": memoryview(bytes(range(100, 124)) + b"\x00\x01\x01"),
    "state": memoryview(b"anything"),
    "index": memoryview(encode_index(INDEX)),
}


def manifest_of(parts: Mapping[str, memoryview]) -> Manifest:
    described = {
        name: Part(True, 3, 1, 0, len(value), tuple(map(digest_of, split(value))))
        for name, value in parts.items()
    }
    return Manifest(3, 2, 30, 31, 1, True, "layout", described, {"loss": 0.25}, skipped=(4,), at_ms=1)


def files_of(parts: Mapping[str, memoryview] = PARTS) -> dict[str, bytes]:
    return {
        name: b"".join(pieces) for name, pieces in write_files("shop", "digits", manifest_of(parts), parts)
    }


def read(files: Mapping[str, bytes]) -> dict[str, memoryview]:
    return read_files(read_record(files[MANIFEST]), lambda name: io.BytesIO(files[name]))


def test_what_was_written_comes_back() -> None:
    files = files_of()
    assert list(files)[-1] == MANIFEST
    assert read(files) == PARTS
    assert read_record(files[MANIFEST]).manifest == manifest_of(PARTS)


def test_the_files_are_safetensors() -> None:
    safetensors = pytest.importorskip("safetensors")
    files = files_of()
    model = dict(safetensors.deserialize(files[MODEL]))
    assert set(model) == {"1.seen", "0.weight", "0.bias"}
    assert (model["0.weight"]["dtype"], list(model["0.weight"]["shape"])) == ("F32", [2, 3])
    assert bytes(model["0.bias"]["data"]) == bytes(range(24, 28))
    assert bytes(model["1.seen"]["data"]) == bytes(range(8))
    state = dict(safetensors.deserialize(files[STATE]))
    assert bytes(state["optimizer/state/0/mask"]["data"]) == b"\x00\x01\x01"
    assert list(state["optimizer/state/0/mask'"]["shape"]) == [0, 3], "two ways to one name"
    assert bytes(state["taskmesh/state"]["data"]) == b"anything"


@pytest.mark.parametrize("name", [MODEL, STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "changed", "head"])
def test_damage_is_found(name: str, damage: str) -> None:
    files = files_of()
    data = files[name]
    if damage == "cut":
        files[name] = data[:-3]
    elif damage == "head":
        files[name] = data[:12] + b"~" + data[13:]
    else:
        at = data.index(b'"digests"') + 15 if name == MANIFEST else len(data) - 1
        files[name] = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    with pytest.raises(CheckpointError):
        read(files)


def test_other_formats_are_refused() -> None:
    data = files_of()[MANIFEST].replace(b'"format":1', b'"format":2')
    with pytest.raises(CheckpointError, match="format 2"):
        read_record(data)
    with pytest.raises(CheckpointError, match="older release"):
        files_of({"parameters": PARTS["parameters"], "state": PARTS["state"]})


@pytest.mark.parametrize(
    "entry",
    [
        Entry(("x",), "float32", (2, 3), 4),
        Entry(("x",), "float32", (-2, -3), 0),
        Entry(("x",), "float32", (2**40, 2**40), 0),
        Entry(("x",), "float32", (1,), -4),
        Entry(("x",), "quaternion", (1,), 0),
        Entry((), "float32", (1,), 0),
    ],
)
def test_an_index_that_cannot_be_is_refused(entry: Entry) -> None:
    with pytest.raises(CheckpointError, match="index is damaged"):
        decode_index(encode_index(Index((entry,), ())), 24, 0)


def test_a_folder_is_there_whole_or_not_at_all(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "export"
    write_folder(folder, RUN, manifest_of(PARTS), PARTS)
    assert {path.name for path in folder.iterdir()} == {MODEL, STATE, MANIFEST}
    assert [path.name for path in folder.parent.iterdir()] == ["export"]
    with pytest.raises(CheckpointError, match="is there already"):
        write_folder(folder, RUN, manifest_of(PARTS), PARTS)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot be written"):
        write_folder(tmp_path / "file" / "export", RUN, manifest_of(PARTS), PARTS)


@pytest.mark.parametrize("name", [MODEL, STATE, MANIFEST])
def test_whatever_is_changed_is_refused_or_makes_no_difference(name: str) -> None:
    draw = random.Random(name)
    whole = files_of()
    for _ in range(300):
        data = bytearray(whole[name])
        for _ in range(draw.choice((1, 1, 1, 5))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        if draw.random() < 0.1:
            del data[draw.randrange(len(data)) :]
        try:
            files = {**whole, name: bytes(data)}
            assert read(files) == PARTS
            assert read_record(files[MANIFEST]) == read_record(whole[MANIFEST])
        except CheckpointError:
            pass
