"""Each wire version that was ever written stays readable: its file in ``tests/golden`` stays."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from taskmesh import codec
from taskmesh.messages import Message, Outcome
from taskmesh.signing import Signer
from tests.unit.test_signing import ID

FOLDER = Path(__file__).parents[1] / "golden"
WRITTEN = [
    (file.stem, name, bytes.fromhex(text))
    for file in sorted(FOLDER.glob("wire-v*.json"))
    for name, text in json.loads(file.read_text()).items()
]
SIGNER = Signer("golden", ("the golden key of 16+ bytes", "unsigned"))


def read(data: bytes) -> Message | Outcome:
    if codec.version_of(data) is not None:
        return codec.decode_message(SIGNER.read(data))
    outcome = SIGNER.read_outcome(ID, data)
    chunks = codec.blob_of(outcome).chunks
    return codec.decode_outcome(outcome, codec.pack_value("what lay beside it") if chunks else None)


@pytest.mark.parametrize(("version", "name", "data"), WRITTEN, ids=[f"{v} {n}" for v, n, _ in WRITTEN])
def test_what_was_written_is_read(version: str, name: str, data: bytes) -> None:
    assert version == f"wire-v{data[0]}"
    assert isinstance(read(data), Message if codec.version_of(data) else Outcome), name


def test_there_is_a_file_for_each_version_that_is_read() -> None:
    versions = {data[0] for _, _, data in WRITTEN}
    assert versions == {codec.WIRE_VERSION, codec.SIGNED_VERSION}


def test_members_that_are_not_known_yet_are_passed_over() -> None:
    message = Message("a" * 20, "add", (1, 2))
    later = codec.encode_call(
        message.id, message.priority, "add", (1, 2), {}, {"colour": "blue", "attempt": 1}
    )
    assert codec.decode_message(later) == message
