"""From append-only files to the history of every message: what survived, and what a lost primary had done besides.

With replication each node has a history of its own: that of its primary up to the moment when it loaded that one's
state, and its own file from then on. The history of those who are primaries at the end is the one that survived.
Whatever another node did that is not in it was undone by a failover.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from benchmarks.chaos.aof import Command, Segment, digest
from taskmesh.codec import HEAD_BYTES, decode_message, decode_outcome
from taskmesh.errors import DecodeError

_STATUS = {b"S": "succeeded", b"F": "failed", b"C": "cancelled", b"X": "expired"}


@dataclass(frozen=True, slots=True)
class Settle:
    """One ending of a message, as the server made it.

    Attributes:
        status: that of the recorded outcome; ``done`` where none was recorded.
        run: the run that succeeded, as its result tells.
        entry: the stream entry that was acknowledged; empty where it was removed before anybody had it.
        reason: why it was dead-lettered; empty where it was not.
    """

    status: str
    run: str = ""
    entry: str = ""
    reason: str = ""


@dataclass(slots=True)
class History:
    """What became of messages.

    Attributes:
        settles: message id -> its endings; one, if all is well.
        steps: message id -> everything that happened to it, in words.
        keys: message id -> the submitter's own name for it, where the message shows it.
        where: message id -> where it is at the end: ``stream``, ``delayed``, ``parked`` or ``ended``.
    """

    settles: dict[str, list[Settle]] = field(default_factory=lambda: defaultdict(list))
    steps: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    keys: dict[str, str] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)


class Place(NamedTuple):
    """A stream entry."""

    stream: bytes
    entry: bytes


class Replay:
    """Goes through blocks in order and writes the history down; it has to have learnt them all before."""

    def __init__(self) -> None:
        self.history = History()
        self._messages: dict[Place, str] = {}

    def learn(self, block: list[Command]) -> None:
        """Which entry is which message: a slot that moves takes entries to a node that did not add them."""
        for words in block:
            if words[0].upper() == b"XADD" and words[1].rpartition(b"}:")[2].startswith(b"tasks:"):
                self._messages[Place(words[1], words[2])] = _id_of(words[-1])

    def add(self, block: list[Command]) -> None:
        acked: list[Place] = []
        removed: list[Place] = []
        added: set[str] = set()
        taken: set[str] = set()  # from the delayed set
        moved: set[str] = set()
        records: dict[str, bytes] = {}
        reasons: dict[str, str] = {}
        for words in block:
            name, key = words[0].upper(), words[1] if len(words) > 1 else b""
            what = key.rpartition(b"}:")[2]
            if name == b"XADD" and what.startswith(b"tasks:"):
                added.add(self._added(Place(key, words[2]), words[-1]))
            elif name == b"XADD" and what in (b"dead", b"parked"):
                fields = dict(zip(words[3::2], words[4::2], strict=False))
                message_id = _id_of(fields[b"message"])
                if what == b"parked":
                    moved.add(message_id)
                    self._step(message_id, "parked", "parked")
                else:
                    reasons[message_id] = fields[b"reason"].decode()
            elif name == b"ZADD" and what == b"delayed":
                # A bare head is put there for a moment by a cancellation that looks for the message.
                for member in words[3::2]:
                    if len(member) > HEAD_BYTES:
                        moved.add(self._delayed(member))
            elif name == b"ZREM" and what == b"delayed":
                taken.update(_id_of(member) for member in words[2:] if len(member) > HEAD_BYTES)
            elif name == b"SET" and what.startswith(b"result:"):
                records[what[7:].decode()] = words[2]
            elif name == b"XACK":
                acked += [Place(key, entry) for entry in words[3:]]
            elif name == b"XDEL" and what.startswith(b"tasks:"):
                removed += [Place(key, entry) for entry in words[2:]]
        # What leaves its place and is put nowhere else was cancelled there.
        dropped = taken - added | {self._messages.get(place, "") for place in removed}
        self._settle(acked, dropped - {""}, moved, records, reasons)

    def _settle(
        self,
        acked: list[Place],
        dropped: set[str],
        moved: set[str],
        records: dict[str, bytes],
        reasons: dict[str, str],
    ) -> None:
        ended: dict[str, str] = {}
        for place in acked:
            message_id = self._messages.get(place)
            if message_id is not None and message_id not in moved:
                ended[message_id] = place.entry.decode()
        for message_id in (*records, *sorted(dropped - moved)):
            ended.setdefault(message_id, "")
        for message_id, entry in ended.items():
            status, run = read_record(records.get(message_id))
            settle = Settle(status, run, entry, reasons.get(message_id, ""))
            self.history.settles[message_id].append(settle)
            self._step(message_id, f"settled: {settle}", "ended")

    def _added(self, place: Place, message: bytes) -> str:
        message_id = _id_of(message)
        self._name(message_id, message)
        queue = place.stream.partition(b"{")[2].replace(b"}:tasks", b"").decode()
        self._step(message_id, f"added to {queue} as {place.entry.decode()}", "stream")
        return message_id

    def _delayed(self, message: bytes) -> str:
        message_id = _id_of(message)
        self._name(message_id, message)
        self._step(message_id, "delayed", "delayed")
        return message_id

    def _name(self, message_id: str, data: bytes) -> None:
        if message_id in self.history.keys:
            return
        try:
            message = decode_message(data)
        except DecodeError:
            return
        if message.args and isinstance(message.args[0], str):
            self.history.keys[message_id] = message.args[0]

    def _step(self, message_id: str, text: str, where: str) -> None:
        self.history.steps[message_id].append(text)
        self.history.where[message_id] = where


def _id_of(message: bytes) -> str:
    return message[2:HEAD_BYTES].decode("ascii", "replace")


def read_record(data: bytes | None) -> tuple[str, str]:
    """Status and run of a recorded outcome; ("done", "") for none."""
    if data is None:
        return "done", ""
    status = _STATUS.get(data[1:2], "unknown")
    if status != "succeeded" or data[2:3] == b"b":
        return status, ""
    value = decode_outcome(data).value
    return status, value.get("run", "") if isinstance(value, dict) else ""


class Histories(NamedTuple):
    """What survived, and what was done by nodes that lost their place and is not part of it."""

    surviving: History
    undone: History


def read_histories(segments: Sequence[Segment], primaries: Iterable[str]) -> Histories:
    """Put the files together; ``primaries`` are the nodes that are such at the end."""
    stitched = _Stitched(segments)
    survived: dict[bytes, list[Command]] = {}
    for node in primaries:
        last = max((s for s in segments if s.node == node), key=lambda segment: segment.sequence)
        survived.update((name, block) for block, name in stitched.history(last))
    undone = {
        name: block
        for segment in segments
        for block, name in stitched.named[id(segment)]
        if name not in survived
    }
    return Histories(_replay(survived.values(), ()), _replay(undone.values(), survived.values()))


def _replay(blocks: Iterable[list[Command]], before: Iterable[list[Command]]) -> History:
    """The history of these blocks; those before them tell of entries alone."""
    replay, replayed = Replay(), list(blocks)
    for block in (*before, *replayed):
        replay.learn(block)
    for block in replayed:
        replay.add(block)
    return replay.history


Named = tuple[list[Command], bytes]


class _Stitched:
    """Segments, and how each continues another."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._segments = segments
        self.named: dict[int, list[Named]] = {
            id(segment): [(block, digest(block)) for block in segment.blocks if _is_telling(block)]
            for segment in segments
        }
        self._places: dict[bytes, list[tuple[int, Segment]]] = defaultdict(list)
        for segment in segments:
            for place, (_, name) in enumerate(self.named[id(segment)]):
                self._places[name].append((place, segment))
        self._histories: dict[int, list[Named]] = {}

    def history(self, segment: Segment) -> list[Named]:
        """All that led to the end of this segment, from the beginning."""
        known = self._histories.get(id(segment))
        if known is None:
            known = self._histories[id(segment)] = self._before(segment) + self.named[id(segment)]
        return known

    def _before(self, segment: Segment) -> list[Named]:
        own = self.named[id(segment)]
        earlier = [s for s in self._segments if s.node == segment.node and s.sequence < segment.sequence]
        if not earlier:
            return []
        # Whoever gave this node its state did the first of these things too, and in the midst of others.
        elsewhere = [
            (place, other)
            for place, other in (self._places[own[0][1]] if own else ())
            if other.node != segment.node and place > 0
        ]
        if not elsewhere:
            return self.history(max(earlier, key=lambda s: s.sequence))
        place, parent = max(elsewhere, key=lambda found: found[0])
        whole = self.history(parent)
        return whole[: len(whole) - len(self.named[id(parent)]) + place]


def _is_telling(block: list[Command]) -> bool:
    """It bears an entry id, a message or a time, so that no other block is the same."""
    return any(words[0].upper() in _TELLING and len(words) > 2 for words in block)


_TELLING = (b"XADD", b"XACK", b"XDEL", b"ZADD", b"ZREM", b"SET")
