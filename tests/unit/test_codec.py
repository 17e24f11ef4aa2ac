"""The wire: what goes in comes out, damage is a DecodeError, and version 1 stays what it is."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from taskmesh import codec
from taskmesh.errors import DecodeError
from taskmesh.messages import Failure, Message, Outcome, Priority, Status

GOLDEN = Path(__file__).parents[1] / "golden" / "wire-v1.json"
quick = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.uuids()
    | st.decimals(allow_nan=False)
    | st.datetimes(timezones=st.none() | st.timezones().map(lambda _: datetime.UTC))
    | st.dates()
    | st.times()
    | st.timedeltas()
)
hashable = st.integers(-1000, 1000) | st.text(max_size=5) | st.uuids()
values = st.recursive(
    scalars | st.sets(hashable, max_size=5) | st.frozensets(hashable, max_size=5),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=5), inner, max_size=5),
    max_leaves=10,
)
ids = st.text("0123456789abcdefghijklmnopqrstuvwxyz", min_size=20, max_size=20)
counts = st.integers(0, 2**40)
messages = st.builds(
    Message,
    id=ids,
    task=st.text(min_size=1, max_size=30),
    args=st.lists(values, max_size=4).map(tuple),
    kwargs=st.dictionaries(st.text(max_size=5), values, max_size=3),
    priority=st.sampled_from(Priority),
    attempt=st.integers(1, 100),
    expires_at_ms=counts,
    blob_chunks=st.integers(0, codec.MAX_BLOB_CHUNKS),
    result_ttl_ms=st.integers(-1, 2**40),
)
failures = st.builds(
    Failure,
    type=st.text(),
    message=st.text(),
    traceback=st.text(),
    args=st.lists(values, max_size=3).map(tuple),
)
outcomes = (
    st.builds(Outcome, status=st.just(Status.SUCCEEDED), value=values)
    | st.builds(Outcome, status=st.just(Status.FAILED), failure=failures)
    | st.sampled_from([Outcome(Status.CANCELLED), Outcome(Status.EXPIRED)])
)


@quick
@given(values)
def test_values_come_back(value: Any) -> None:
    again = codec.unpack_value(codec.pack_value(value))
    assert again == value
    assert type(again) is type(value)


@quick
@given(messages)
def test_messages_come_back(message: Message) -> None:
    data = codec.encode_message(message)
    assert codec.decode_message(data) == message
    assert data[1:2] == str(message.priority.value).encode()  # what the scripts read
    assert data[2:22].decode() == message.id


@quick
@given(outcomes)
def test_outcomes_come_back(outcome: Outcome) -> None:
    data = codec.encode_outcome(outcome)
    assert codec.blob_of(data) == (0, b"", "")
    assert codec.decode_outcome(data) == outcome
    assert codec.decode_outcome(data[:3], data[3:]) == outcome  # the body out of a blob


@settings(quick, max_examples=500)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_decode_error_or_a_message(data: bytes) -> None:
    for read in (codec.decode_message, codec.decode_outcome, codec.unpack_value, codec.blob_of):
        try:
            read(data)
        except DecodeError:
            pass


@quick
@given(messages, st.data())
def test_damaged_messages_are_a_decode_error_or_a_message(message: Message, data: st.DataObject) -> None:
    whole = bytearray(codec.encode_message(message))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    for damaged in (bytes(whole), bytes(whole[:place])):
        try:
            codec.decode_message(damaged)
        except DecodeError:
            pass


@quick
@given(outcomes, st.data())
def test_damaged_outcomes_are_a_decode_error_or_an_outcome(outcome: Outcome, data: st.DataObject) -> None:
    whole = bytearray(codec.encode_outcome(outcome))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] = data.draw(st.integers(0, 255))
    for damaged in (bytes(whole), bytes(whole[:place])):
        try:
            codec.decode_outcome(damaged)
        except DecodeError:
            pass


@pytest.mark.parametrize("cut", range(1, 30))
def test_a_message_cut_short_is_a_decode_error(cut: int) -> None:
    data = codec.encode_message(Message("a" * 20, "t", (1, "two")))
    if cut < len(data):
        with pytest.raises(DecodeError):
            codec.decode_message(data[:-cut])


@pytest.mark.parametrize(
    "data",
    [b"", b"\x03" + b"x" * 40, b"\x01" + b"9" + b"x" * 40, b"\x011" + b"\xff" * 20 + b"\x92\xa1t\x90"],
    ids=["empty", "another version", "no such lane", "id that is not ASCII"],
)
def test_what_is_no_message_says_why(data: bytes) -> None:
    with pytest.raises(DecodeError, match=r"version|head|id"):
        codec.decode_message(data)


def test_a_wire_type_that_is_not_known_is_a_decode_error() -> None:
    import msgpack

    with pytest.raises(DecodeError, match="wire type 99"):
        codec.unpack_value(msgpack.packb(msgpack.ExtType(99, b"")))


def test_users_may_let_types_of_their_own_travel() -> None:
    class Celsius(float):
        pass

    codec.register(codec.WireType(99, Celsius, lambda v: str(float(v)).encode(), lambda d: Celsius(float(d))))
    try:
        again = codec.unpack_value(codec.pack_value([Celsius(36.6)]))
        assert type(again[0]) in (Celsius, float)
        assert again == [36.6]
    finally:
        del codec._by_class[Celsius], codec._by_code[99]


MOMENT = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
CASES: dict[str, Message | Outcome] = {
    "plain": Message("a" * 12 + "00000001", "add", (1, 2)),
    "every member": Message(
        "b" * 12 + "0000002a",
        "mail.send",
        ("x",),
        {"n": 1},
        Priority.HIGH,
        3,
        1_700_000_000_000,
        2,
        60_000,
    ),
    "low, no arguments": Message("c" * 12 + "ffffffff", "tick", priority=Priority.LOW),
    "everyday types": Message(
        "d" * 12 + "00000003",
        "echo",
        (
            None,
            True,
            -1,
            1.5,
            "ü",
            b"\x00",
            MOMENT,
            MOMENT.date(),
            MOMENT.timetz(),
            datetime.timedelta(1, 2, 3),
            uuid.UUID(int=5),
            decimal.Decimal("1.10"),
            {1},
            frozenset({2}),
            1 + 2j,
            [1, [2]],
            {"k": {"l": 1}},
        ),
    ),
    "succeeded": Outcome(Status.SUCCEEDED, {"score": 0.5}),
    "failed": Outcome(Status.FAILED, failure=Failure("ValueError", "no", "Traceback ...", ("no", 1))),
    "cancelled": Outcome(Status.CANCELLED),
    "expired": Outcome(Status.EXPIRED),
}


def encode(case: Message | Outcome) -> bytes:
    return codec.encode_message(case) if isinstance(case, Message) else codec.encode_outcome(case)


@pytest.mark.parametrize("name", CASES)
def test_wire_version_1_stays_what_it_is(name: str) -> None:
    """If this fails the format has changed: it needs a new version, and the old one has to stay readable."""
    data = bytes.fromhex(json.loads(GOLDEN.read_text())[name])
    case = CASES[name]
    read = codec.decode_message if isinstance(case, Message) else codec.decode_outcome
    assert read(data) == case
    assert encode(case) == data


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps({name: encode(case).hex() for name, case in CASES.items()}, indent=2) + "\n")
