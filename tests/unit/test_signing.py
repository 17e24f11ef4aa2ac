"""Signatures: what is signed is taken by whoever has the key, for that Mesh and that message, and by nobody else."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from taskmesh import ConfigurationError, MeshSettings, codec
from taskmesh.errors import DecodeError
from taskmesh.messages import Message, Priority, Status
from taskmesh.settings import from_environment
from taskmesh.signing import SIGNATURE_BYTES, Signer, Untrusted, signer_of
from tests.unit.test_codec import CASES, encode

GOLDEN = Path(__file__).parents[1] / "golden" / "wire-v2.json"
OLD, NEW, OTHER = "the old key of 16+ bytes", "the new key of 16+ bytes", "somebody else's key"
ID = "a" * 12 + "00000001"
PLAIN = codec.encode_message(Message(ID, "add", (1, 2)))
OUTCOME = codec.encode_success(3)


def test_what_is_signed_reads_as_it_was() -> None:
    signer = Signer("shop", (NEW,))
    signed = signer.sign(PLAIN)
    assert signed[0] == codec.SIGNED_VERSION
    assert len(signed) == len(PLAIN) + SIGNATURE_BYTES
    assert signed[1 : codec.HEAD_BYTES] == PLAIN[1 : codec.HEAD_BYTES], "scripts read the head"
    assert signer.read(signed) == PLAIN
    assert signer.read_outcome(ID, signer.sign_outcome(ID, OUTCOME)) == OUTCOME


def test_any_changed_byte_and_any_cut_are_refused() -> None:
    signer = Signer("shop", (NEW,))
    signed = signer.sign(PLAIN)
    for place in range(1, len(signed)):
        changed = bytearray(signed)
        changed[place] ^= 1
        for damaged in (bytes(changed), signed[:place]):
            with pytest.raises(Untrusted):
                signer.read(damaged)


@given(st.binary(max_size=100))
def test_garbage_is_refused_or_left_to_the_codec(data: bytes) -> None:
    signer = Signer("shop", (NEW,))
    for damaged in (data, b"\x02" + data, b"\x01" + data):
        try:
            assert signer.read(damaged) == damaged
            codec.decode_message(damaged)
        except DecodeError:
            continue
        raise AssertionError("an unsigned message was taken")


@pytest.mark.parametrize(
    "other",
    [Signer("shop", (OTHER,)), Signer("shop-2", (NEW,)), Signer("shop", (OLD, OTHER))],
    ids=["another key", "another Mesh", "none of two keys"],
)
def test_another_key_and_another_mesh_are_refused(other: Signer) -> None:
    signer = Signer("shop", (NEW,))
    with pytest.raises(Untrusted, match="fits none of this Mesh's keys"):
        other.read(signer.sign(PLAIN))
    with pytest.raises(Untrusted, match="fits none of this Mesh's keys"):
        other.read_outcome(ID, signer.sign_outcome(ID, OUTCOME))


def test_an_outcome_is_that_messages_and_no_message() -> None:
    signer = Signer("shop", (NEW,))
    with pytest.raises(Untrusted):
        signer.read_outcome("b" * 20, signer.sign_outcome(ID, OUTCOME))
    with pytest.raises(Untrusted):
        signer.read(signer.sign_outcome(ID, OUTCOME))
    with pytest.raises(Untrusted):
        signer.read_outcome(ID, signer.sign(PLAIN))


def test_keys_are_changed_without_a_message_lost() -> None:
    """Each state of a change-over takes what the states before and after it send."""
    states = [None, ("unsigned", OLD), (OLD, "unsigned"), (OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]
    signers = [signer_of("shop", state or ()) for state in states]
    pairs = list(itertools.pairwise(signers))
    for sender, receiver in [*pairs, *((after, before) for before, after in pairs)]:
        sent = PLAIN if sender is None else sender.sign(PLAIN)
        assert codec.decode_message(sent if receiver is None else receiver.read(sent)).args == (1, 2)


def test_what_is_not_signed_is_refused_unless_the_word_stands_there() -> None:
    with pytest.raises(Untrusted, match="is not signed, and this Mesh takes only signed ones"):
        Signer("shop", (NEW,)).read(PLAIN)
    with pytest.raises(Untrusted, match="is not signed"):
        Signer("shop", (NEW,)).read_outcome(ID, OUTCOME)
    assert Signer("shop", (NEW, "unsigned")).read(PLAIN) == PLAIN
    assert Signer("shop", ("unsigned", NEW)).sign(PLAIN) == PLAIN
    assert Signer("shop", ("unsigned", NEW)).digest(b"blob") == b""


def test_a_mesh_without_keys_says_that_it_cannot_tell() -> None:
    signer = Signer("shop", (NEW,))
    with pytest.raises(
        DecodeError, match="the message is signed, and this Mesh has no keys to check it with"
    ):
        codec.decode_message(signer.sign(PLAIN))
    with pytest.raises(DecodeError, match="the outcome is signed, and this Mesh has no keys"):
        codec.decode_outcome(signer.sign_outcome(ID, OUTCOME))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("short",), "signing key 1 has 5 bytes; a key has at least 16"),
        ((NEW, ""), "signing key 2 has 0 bytes; a key has at least 16"),
        (("unsigned",), "signing_keys holds the word 'unsigned' and no key"),
        (NEW, "signing_keys must be a tuple of strings"),
        ((NEW.encode(),), "signing_keys must be a tuple of strings"),
    ],
)
def test_keys_that_cannot_work_are_refused_and_not_shown(keys: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        MeshSettings(signing_keys=keys)
    assert str(raised.value) == message


def test_keys_come_from_the_environment_and_stand_in_no_repr(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TASKMESH_SIGNING_KEYS", f"{NEW}, {OTHER},unsigned")
    settings = from_environment()
    assert settings.signing_keys == (NEW, OTHER, "unsigned")
    assert OTHER not in repr(settings)
    monkeypatch.setenv("TASKMESH_SIGNING_KEYS", "")
    assert from_environment().signing_keys == ()


def test_a_long_key_counts_whole() -> None:
    long = "k" * 200
    with pytest.raises(Untrusted):
        Signer("shop", (long + "x",)).read(Signer("shop", (long,)).sign(PLAIN))


SEALED = {**CASES, "blob": Message(ID, "add", blob_chunks=2, blob_digest=b"d" * 16)}
BLOB_OUTCOME = codec.encode_blob_outcome(Status.SUCCEEDED, codec.BlobClaim(2, b"d" * 16, "run1"))


def sealed(name: str) -> bytes:
    signer = Signer("golden", ("the golden key of 16+ bytes",))
    if name == "blob outcome":
        return signer.sign_outcome(ID, BLOB_OUTCOME)
    case = SEALED[name]
    return signer.sign(encode(case)) if isinstance(case, Message) else signer.sign_outcome(ID, encode(case))


@pytest.mark.parametrize("name", [*SEALED, "blob outcome"])
def test_wire_version_2_stays_what_it_is(name: str) -> None:
    """If this fails the format has changed: it needs a new version, and the old one has to stay readable."""
    assert sealed(name).hex() == json.loads(GOLDEN.read_text())[name]


def test_a_blob_is_told_by_its_digest() -> None:
    message = SEALED["blob"]
    assert isinstance(message, Message)
    assert codec.decode_message(codec.encode_message(message)) == message
    assert codec.blob_of(BLOB_OUTCOME) == (2, b"d" * 16, "run1")
    assert codec.blob_of(codec.encode_blob_outcome(Status.SUCCEEDED, codec.BlobClaim(2))) == (2, b"", "")


def test_the_priority_is_signed() -> None:
    signer = Signer("shop", (NEW,))
    signed = signer.sign(codec.encode_message(Message(ID, "add", priority=Priority.LOW)))
    with pytest.raises(Untrusted):
        signer.read(signed[:1] + b"0" + signed[2:])


if __name__ == "__main__":
    GOLDEN.write_text(
        json.dumps({name: sealed(name).hex() for name in [*SEALED, "blob outcome"]}, indent=2) + "\n"
    )
