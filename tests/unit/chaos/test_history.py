"""Histories out of append-only files: how a message ended, and which node's doings survived."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.chaos.aof import Command, Segment, read_segments
from benchmarks.chaos.history import Histories, Settle, read_histories
from taskmesh.codec import encode_message, encode_outcome, encode_success
from taskmesh.messages import Message, Outcome, Status

PREFIX = b"taskmesh:{chaos:main:0}:"
STREAM, DELAYED, DEAD = PREFIX + b"tasks:normal", PREFIX + b"delayed", PREFIX + b"dead"
CANCELLED = encode_outcome(Outcome(Status.CANCELLED))
FAILED = encode_outcome(Outcome(Status.FAILED))


def name(number: int) -> str:
    return f"{number:020d}"


def message(number: int, attempt: int = 1) -> bytes:
    return encode_message(Message(name(number), "nap", (f"key-{number}",), attempt=attempt))


def added(number: int, entry: bytes | None = None, attempt: int = 1) -> Command:
    return [b"XADD", STREAM, entry or b"%d-0" % number, b"message", message(number, attempt)]


def acked(*entries: bytes) -> list[Command]:
    return [[b"XACK", STREAM, b"workers", *entries], [b"XDEL", STREAM, *entries]]


def recorded(number: int, outcome: bytes) -> Command:
    return [b"SET", PREFIX + b"result:" + name(number).encode(), outcome, b"PXAT", b"99"]


def succeeded(number: int, run: str) -> list[Command]:
    outcome = encode_success({"key": "", "run": run, "value": None})
    return [recorded(number, outcome), *acked(b"%d-0" % number)]


def read(*blocks: list[Command]) -> Histories:
    return read_histories([Segment("node-0", 1, list(blocks))], ["node-0"])


def settles(*blocks: list[Command]) -> dict[str, list[Settle]]:
    return dict(read(*blocks).surviving.settles)


def test_endings() -> None:
    dead: Command = [b"XADD", DEAD, b"9-0", b"message", message(2), b"reason", b"worker died"]
    found = settles(
        [added(1)],
        [added(2)],
        [added(3)],
        succeeded(1, "7.1"),
        [recorded(2, FAILED), dead, *acked(b"2-0")],
        acked(b"3-0"),
    )
    assert found == {
        name(1): [Settle("succeeded", "7.1", "1-0")],
        name(2): [Settle("failed", "", "2-0", "worker died")],
        name(3): [Settle("done", "", "3-0")],
    }


def test_a_retry_and_its_promotion_are_no_endings() -> None:
    again = message(1, 2)
    blocks = [
        [added(1)],
        [[b"ZADD", DELAYED, b"5", again], *acked(b"1-0")],
        [added(1, b"6-0", 2), [b"ZREM", DELAYED, again]],
    ]
    histories = read(*blocks)
    assert dict(histories.surviving.settles) == {}
    assert histories.surviving.where[name(1)] == "stream"
    assert histories.surviving.keys[name(1)] == "key-1"
    assert settles(*blocks, acked(b"6-0")) == {name(1): [Settle("done", "", "6-0")]}


def test_cancelled_at_rest_with_and_without_a_record() -> None:
    head = message(3)[:22]
    found = settles(
        [added(1)],
        [added(2)],
        [[b"ZADD", DELAYED, b"5", message(3)]],
        [[b"ZADD", DELAYED, b"5", message(4)]],
        [[b"XDEL", STREAM, b"1-0"], recorded(1, CANCELLED)],
        [[b"XDEL", STREAM, b"2-0"]],
        [[b"ZADD", DELAYED, b"5", head], [b"ZREM", DELAYED, head], [b"ZREM", DELAYED, message(3)]],
        [[b"ZREM", DELAYED, message(4)], recorded(4, CANCELLED)],
    )
    assert found == {
        name(1): [Settle("cancelled")],
        name(2): [Settle("done")],
        name(3): [Settle("done")],
        name(4): [Settle("cancelled")],
    }


def test_a_second_ending_shows() -> None:
    found = settles([added(1)], succeeded(1, "7.1"), [added(1, b"2-0")], acked(b"2-0"))
    assert found[name(1)] == [Settle("succeeded", "7.1", "1-0"), Settle("done", "", "2-0")]


def test_a_slot_that_moved_is_settled_where_it_is_now() -> None:
    source, target = Segment("node-0", 1, [[added(1)]]), Segment("node-1", 1, [acked(b"1-0")])
    histories = read_histories([source, target], ["node-1", "node-0"])
    assert histories.surviving.settles == {name(1): [Settle("done", "", "1-0")]}


# Primaries that were lost


def test_what_the_lost_primary_did_alone_is_undone() -> None:
    shared = [[added(number)] for number in (1, 2)]
    lost = Segment("node-0", 1, [*shared, succeeded(1, "7.1"), [added(3)]])
    new = Segment("node-1", 2, [*shared, [added(4)], succeeded(1, "8.1")])
    surviving, undone = read_histories([lost, new], ["node-1"])
    assert set(surviving.steps) == {name(1), name(2), name(4)}
    assert surviving.settles == {name(1): [Settle("succeeded", "8.1", "1-0")]}
    assert set(undone.steps) == {name(1), name(3)}
    assert undone.settles == {name(1): [Settle("succeeded", "7.1", "1-0")]}


def test_a_node_that_followed_and_leads_again_has_the_history_of_those_between() -> None:
    first, second, third = [[added(1)], [added(2)]], [[added(3)], [added(4)]], [[added(5)]]
    segments = [
        Segment("node-0", 1, [*first, [added(8)]]),  # killed; 8 was undone
        Segment(
            "node-1", 2, [*first, *second, [added(9)]]
        ),  # took over, was killed in its turn; 9 was undone
        Segment("node-0", 2, [second[1], *third]),  # loaded a state that had 3, heard of 4, took over
        Segment("node-1", 3, [third[0]]),
    ]
    surviving, undone = read_histories(segments, ["node-0"])
    assert sorted(surviving.steps) == [name(number) for number in (1, 2, 3, 4, 5)]
    assert sorted(undone.steps) == [name(number) for number in (8, 9)]


def test_files_are_read_as_servers_write_them(tmp_path: Path) -> None:
    def wire(*words: Any) -> bytes:
        parts = [word if isinstance(word, bytes) else str(word).encode() for word in words]
        return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)

    folder = tmp_path / "node-0"
    folder.mkdir()
    (folder / "appendonly.aof.2.incr.aof").write_bytes(wire(b"MULTI") + wire(*added(2)) + wire(b"EXEC"))
    whole = wire(b"SELECT", 0) + wire(*added(1)) + wire(b"MULTI") + wire(*added(3))
    (folder / "appendonly.aof.1.incr.aof").write_bytes(whole)  # killed before EXEC
    assert read_segments(tmp_path) == [
        Segment("node-0", 1, [[added(1)]]),
        Segment("node-0", 2, [[added(2)]]),
    ]
