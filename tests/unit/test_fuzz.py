"""Whatever the bytes: an error of the tree, or a value; soon, and in memory in proportion to their size."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from taskmesh import arrays, codec, tensors
from taskmesh.broker import deadletter
from taskmesh.broker.streams import Partition
from taskmesh.checkpoints import manifest
from taskmesh.errors import CheckpointError, DecodeError
from taskmesh.keys import PartitionKeys, RunKeys
from taskmesh.messages import Message
from taskmesh.signing import Signer
from taskmesh.training.ledger import LedgerEntry, decode_entry
from tests.hostile import HEAD, Damage, bombs
from tests.unit.test_codec import CASES, encode

arrays.register()
tensors.register()
SEEDS = st.integers(0, 2**32)
thorough = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
SIGNER = Signer("shop", ("a key of 16 bytes or more",))
ENOUGH_SECONDS = 2.0
ENOUGH_BYTES = 30_000_000

MESSAGES = [encode(case) for case in CASES.values() if isinstance(case, Message)]
OUTCOMES = [encode(case) for case in CASES.values() if not isinstance(case, Message)]
PART = manifest.Part(True, 1, 1, 0, 10, (b"d" * 16,))
MANIFEST = manifest.Manifest(1, 0, 1, 1, 1, True, "layout", {"parameters": PART}, {"loss": 0.5})
ENTRY = msgspec.msgpack.encode(LedgerEntry(2, 1, 2, 2, (10, 10)))


@contextmanager
def bounded() -> Iterator[None]:
    """What happens inside takes neither long nor much memory."""
    tracemalloc.start()
    began = time.process_time()  # what a busy machine does not stretch
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.process_time() - began < ENOUGH_SECONDS
    assert peak < ENOUGH_BYTES, f"{peak:,} bytes"


def refuses_or_reads(read: Callable[[bytes], Any], data: bytes, error: type[Exception] = DecodeError) -> None:
    with suppress(error):
        read(data)


def read_whole(data: bytes) -> None:
    """As a worker reads a message: what is read can also be written again, as a retry is."""
    codec.encode_message(codec.decode_message(data))


BLOB_CLAIM = codec.BlobClaim(3, b"d" * 16, "ab1")
READERS: dict[str, tuple[Callable[[bytes], Any], list[bytes]]] = {
    "message": (read_whole, MESSAGES),
    "task of a message": (codec.peek_task, MESSAGES),
    "version of a message": (codec.version_of, MESSAGES),
    "value": (codec.unpack_value, [message[codec.HEAD_BYTES :] for message in MESSAGES]),
    "outcome": (codec.decode_outcome, OUTCOMES),
    "blob of an outcome": (
        codec.blob_of,
        [codec.encode_blob_outcome("succeeded", codec.BlobClaim(3, b"d" * 16, "ab1"))],
    ),  # type: ignore[arg-type]
    "signed message": (lambda data: read_whole(SIGNER.read(data)), [SIGNER.sign(data) for data in MESSAGES]),
    "signed outcome": (
        lambda data: codec.decode_outcome(SIGNER.read_outcome("a" * 20, data)),
        [SIGNER.sign_outcome("a" * 20, data) for data in OUTCOMES],
    ),
}


@pytest.mark.parametrize("name", READERS)
@thorough
@given(seed=SEEDS)
def test_damaged_bytes(name: str, seed: int) -> None:
    read, samples = READERS[name]
    data = Damage(seed, samples).next()
    note(f"seed {seed}: {data.hex()}")
    refuses_or_reads(read, data)


@pytest.mark.parametrize("name", READERS)
def test_every_cut_and_every_flipped_bit_of_real_bytes(name: str) -> None:
    read, samples = READERS[name]
    for sample in samples:
        for place in range(len(sample)):
            refuses_or_reads(read, sample[:place])
            for bit in range(8):
                changed = bytearray(sample)
                changed[place] ^= 1 << bit
                refuses_or_reads(read, bytes(changed))


@pytest.mark.parametrize("number", range(len(bombs())))
def test_bombs(number: int) -> None:
    bomb = bombs()[number]
    with bounded():
        for data in (bomb, b"\x91" + bomb, b"\x92\x01" + bomb):
            refuses_or_reads(codec.unpack_value, data)
            refuses_or_reads(codec.decode_message, HEAD + b"\x92\xa3add" + data)
            codec.peek_task(HEAD + b"\x92\xa3add" + data)
            refuses_or_reads(codec.decode_outcome, b"\x01Si" + data)
            refuses_or_reads(codec.blob_of, b"\x01Sb" + data)


def test_a_bomb_in_a_set_in_a_set() -> None:
    for bomb in bombs():
        data = bomb
        for _ in range(codec.MAX_NESTED_EXTENSIONS):
            data = msgpack.packb(msgpack.ExtType(7, data))
        with bounded():
            refuses_or_reads(codec.unpack_value, data)


def test_depth_is_bounded_on_the_way_in_and_on_the_way_out() -> None:
    value: Any = None
    for _ in range(500):
        value = [value]
    assert codec.unpack_value(codec.pack_value(value)) == value
    for _ in range(600):
        value = [value]
    with pytest.raises(ValueError, match="recursion limit"):
        codec.pack_value(value)
    for depth in (1025, 2000, 100_000):
        with pytest.raises(DecodeError, match="nested too deeply"):
            codec.unpack_value(b"\x91" * depth + b"\xc0")
    inner: frozenset[Any] = frozenset([1])
    for _ in range(codec.MAX_NESTED_EXTENSIONS - 1):
        inner = frozenset([inner])
    assert codec.unpack_value(codec.pack_value(inner)) == inner
    with pytest.raises(ValueError, match="nested more than 16 deep"):
        codec.pack_value(frozenset([inner]))
    assert codec.unpack_value(codec.pack_value(inner)) == inner, "the count is left as it was"


def partition(signer: Signer | None) -> Partition:
    """One that no server is behind: reading needs none."""
    return Partition(None, PartitionKeys("shop", "mail", 0), signer)  # type: ignore[arg-type]


FIELDS = (b"message", b"reason", b"deliveries", b"worker", b"outcome", b"at", b"task")


@thorough
@given(seed=SEEDS)
def test_entries_of_the_dead_letter_streams(seed: int) -> None:
    """Listing goes on whatever lies there, and what lies there can be thrown away."""
    note(f"seed {seed}")
    damage = Damage(seed, MESSAGES)
    of_outcomes = Damage(seed, OUTCOMES)
    flat: list[bytes] = []
    for field in FIELDS:
        if damage.draw.random() < 0.8:
            flat += (field, of_outcomes.next() if field == b"outcome" else damage.next())
    letter = deadletter.read(partition(None), b"1-1", flat)
    assert letter.entry == "1-1"
    assert isinstance(letter.reason, str)
    repr(letter)
    deadletter.read(partition(SIGNER), b"1-1", flat)


@thorough
@given(seed=SEEDS)
def test_manifests_of_checkpoints(seed: int) -> None:
    note(f"seed {seed}")
    damage = Damage(seed, [manifest.encode(MANIFEST)])
    for _ in range(5):
        refuses_or_reads(manifest.decode, damage.next(), CheckpointError)


def test_a_manifest_that_claims_what_it_does_not_hold() -> None:
    assert manifest.decode(manifest.encode(MANIFEST)) == MANIFEST
    assert MANIFEST.keys(RunKeys("mesh", "run"))
    for bomb in bombs():
        with bounded():
            refuses_or_reads(manifest.decode, bomb, CheckpointError)


@thorough
@given(seed=SEEDS)
def test_entries_of_a_runs_ledger(seed: int) -> None:
    note(f"seed {seed}")
    damage = Damage(seed, [ENTRY])
    for _ in range(5):
        refuses_or_reads(decode_entry, damage.next(), CheckpointError)
