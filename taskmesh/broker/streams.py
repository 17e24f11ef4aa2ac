"""Queues as streams: the typed face of the scripts.

A ``Partition`` is one queue's streams and what belongs to them, all in one slot. Delivery is at least once;
a message is settled once.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import msgspec

from taskmesh.broker import scripts
from taskmesh.broker.caller import Caller
from taskmesh.broker.link import Argument
from taskmesh.codec import SIGNED_VERSION, WIRE_VERSION
from taskmesh.keys import GROUP, RETURNED, SUSPECTS, PartitionKeys, reply_producer
from taskmesh.messages import Entry, Message, Priority
from taskmesh.settings import MIB
from taskmesh.signing import Signer

PRODUCER_TTL_MS = 3_600_000
CANCEL_MARK_TTL_MS = 7 * 86_400_000
LANE_QUOTAS = {Priority.HIGH: 12, Priority.NORMAL: 3, Priority.LOW: 1}
CONTROL_LENGTH = 1000  # the scripts keep at least so many control entries
MAX_CANCEL_MARKS = 100_000
MAX_SETTLE = 128
RELEASE_AT_ONCE = 500
_PRIORITIES = tuple(Priority)


class Cancelled(StrEnum):
    """What a cancellation did."""

    ENDED = "ended"
    CANCELLED = "cancelled"
    REQUESTED = "requested"


class Accepted(NamedTuple):
    """What became of a batch: how many of its messages, and where each was put (None when told once before)."""

    messages: int
    places: list[str | None]


class Settlement(msgspec.Struct, gc=False):
    """One delivery's ending, as the settle script takes it.

    Attributes:
        kind: the script's letter.
        result_key: where the outcome goes; None when there is no record.
        reply: the reply stream's key; None when nobody is told.
        arguments: what follows the kind, the reply's number left out.
        blobs: chunks that go with it.
        written: chunks of its outcome, which nobody reads if its claim was lost.
    """

    entry: bytes
    kind: str
    order: int
    result_key: bytes | None = None
    reply: bytes | None = None
    arguments: tuple[Argument, ...] = ()
    blobs: tuple[bytes, ...] = ()
    written: tuple[bytes, ...] = ()


class Joined(NamedTuple):
    last_control: bytes
    cancelled: list[str]
    released: int


class Partition:
    """One partition of one queue.

    Attributes:
        signer: signs and checks what goes through it; None where the Mesh has no keys.
        max_payload_bytes: the limit of the Mesh's settings.
        wire_versions: of the messages that can be read here.
    """

    def __init__(
        self,
        caller: Caller,
        keys: PartitionKeys,
        signer: Signer | None = None,
        max_payload_bytes: int = 64 * MIB,
    ) -> None:
        self.caller = caller
        self.keys = keys
        self.signer = signer
        self.max_payload_bytes = max_payload_bytes
        self.wire_versions = (WIRE_VERSION,) if signer is None else (WIRE_VERSION, SIGNED_VERSION)

    async def submit(
        self,
        producer: str,
        number: int,
        bound: int,
        now: Sequence[bytes],
        later: Sequence[tuple[str, bytes]] = (),
        blobs: Sequence[bytes] = (),
    ) -> Accepted:
        """Add a producer's batch, once, however often it is sent.

        Batches of a producer must be sent one after the other, with rising numbers.

        Args:
            bound: messages not settled that the queue may hold; 0 for any number.
            now: encoded messages that are due at once.
            later: due time ("+ms" from now, or "ms" of Redis time) and encoded message.
            blobs: chunks that become persistent with the batch.

        Raises:
            BrokerFull: nothing was accepted.
            BrokerUnavailable: whether it was accepted is not known.
        """
        keys = self.keys
        reply = await self.caller.run(
            scripts.SUBMIT,
            keys.tag,
            [*keys.lanes, keys.delayed, keys.producer(producer), keys.control, *blobs],
            (
                number,
                bound,
                PRODUCER_TTL_MS,
                len(now),
                *now,
                *(argument for pair in later for argument in pair),
            ),
        )
        count = int(reply[0])
        places: list[str | None] = [place.decode() for place in reply[1:]]
        return Accepted(count, places or [None] * count)

    def fetch_command(self, worker: bytes, total: int, quotas: Sequence[int]) -> tuple[Argument, ...]:
        """The command that delivers up to ``total`` entries without waiting."""
        return self.caller.prepare(scripts.FETCH, self.keys.lanes, (GROUP, worker, total, *quotas))

    def wait_command(self, worker: bytes, count: int, block_ms: int) -> tuple[Argument, ...]:
        """The command that waits for entries; ``count`` bounds each lane."""
        lanes = self.keys.lanes
        head = ("XREADGROUP", "GROUP", GROUP, worker, "COUNT", count, "BLOCK", block_ms, "STREAMS")
        return (*head, *lanes, *([">"] * len(lanes)))

    def read_waited(
        self, reply: Sequence[tuple[bytes, Sequence[tuple[bytes, list[bytes] | None]]]] | None
    ) -> list[Entry]:
        """The entries of a ``wait_command``'s reply."""
        entries: list[Entry] = []
        for key, rows in reply or ():
            _extend(entries, _PRIORITIES[self.keys.lanes.index(key)], rows)
        return entries

    async def own_pending(self, worker: bytes) -> list[tuple[Priority, bytes, int]]:
        """Lane, id and delivery count of every entry that the server holds for this worker."""
        found: list[tuple[Priority, bytes, int]] = []
        for lane, key in zip(_PRIORITIES, self.keys.lanes, strict=True):
            start = b"-"
            while True:
                rows = await self.caller.command(
                    self.keys.tag, "XPENDING", key, GROUP, start, "+", 1000, worker
                )
                found += [(lane, entry_id, int(deliveries)) for entry_id, _, _, deliveries in rows]
                if len(rows) < 1000:
                    break
                start = b"(" + rows[-1][0]
        return found

    async def holder(self, lane: Priority, entry_id: bytes) -> tuple[bytes, int] | None:
        """The worker that an entry was delivered to, and the milliseconds since; None where it waits or has ended."""
        key = self.keys.lanes[lane]
        rows = await self.caller.command(self.keys.tag, "XPENDING", key, GROUP, entry_id, entry_id, 1)
        found = [(bytes(worker), int(idle_ms)) for _, worker, idle_ms, _ in rows]
        return found[0] if found and found[0][0] not in (RETURNED, *SUSPECTS) else None

    async def read(self, lane: Priority, entry_id: bytes, deliveries: int) -> Entry:
        """One entry again, without delivering it (its message is None where it was deleted)."""
        key = self.keys.lanes[lane]
        rows = await self.caller.command(self.keys.tag, "XRANGE", key, entry_id, entry_id)
        return Entry(lane, entry_id, rows[0][1][1] if rows else None, deliveries)

    def settle_command(
        self, lane: Priority, worker: bytes, number: int, slot: int, batch: Sequence[Settlement]
    ) -> tuple[Argument, ...]:
        """The command that ends up to 128 deliveries of one lane.

        ``number`` rises with every call; ``slot`` keeps apart the calls that are under way at once, so that each
        may be sent again. The reply lists the places in ``batch``, from 1, whose claim was lost; [-1] says that
        this number was done before.
        """
        keys = self.keys
        results: list[bytes] = []
        replies: dict[bytes, int] = {}
        blobs: list[bytes] = []
        blob_counts: list[Argument] = []
        arguments: list[Argument] = []
        for place, item in enumerate(batch, 1):
            if item.result_key is None:
                arguments += (item.entry, item.kind, *item.arguments)
            else:
                results.append(item.result_key)
                reply = 0 if item.reply is None else replies.setdefault(item.reply, len(replies) + 1)
                outcome, ttl_ms, *rest = item.arguments
                arguments += (item.entry, item.kind, outcome, ttl_ms, reply, *rest)
            if item.blobs:
                blob_counts += (place, len(item.blobs))
                blobs += item.blobs
        fixed = (
            keys.lanes[lane],
            keys.settles(worker),
            keys.delayed,
            keys.dead,
            keys.parked,
            keys.known,
            keys.cancelled,
            keys.control,
        )
        head = (GROUP, worker, number, len(batch), len(results), len(replies), len(blob_counts) // 2, slot)
        return self.caller.prepare(
            scripts.SETTLE, [*fixed, *results, *replies, *blobs], (*head, *arguments, *blob_counts)
        )

    async def join(self, worker: bytes, abilities: Sequence[str]) -> Joined:
        """Enter a worker: its lease, what it knows; parked messages that it can run go back to the queue."""
        keys = self.keys
        known = "\n" + "\n".join(abilities) + "\n"
        begin = b"-"
        total = 0
        while True:
            control, cancelled, released, begin = await self.caller.run(
                scripts.JOIN,
                keys.tag,
                [*keys.lanes, keys.workers, keys.known, keys.parked, keys.control, keys.cancelled],
                (GROUP, worker, known, begin, RELEASE_AT_ONCE, MAX_CANCEL_MARKS),
            )
            total += int(released)
            if not begin:
                return Joined(
                    control, [message_id.decode("ascii", "replace") for message_id in cancelled], total
                )

    async def leave(self, worker: bytes) -> bool:
        """Strike a worker off that holds nothing; False when it still holds entries."""
        keys = self.keys
        gone = await self.caller.run(
            scripts.LEAVE,
            keys.tag,
            [*keys.lanes, keys.workers, keys.known, keys.settles(worker)],
            (GROUP, worker),
            retry_for=2.0,
        )
        return bool(gone)

    async def claim(self, dead: bytes, last_seen: bytes, claimer: bytes, count: int) -> list[Entry]:
        """Take up to ``count`` entries over from a worker that is dead and has not been heard of since."""
        keys = self.keys
        reply = await self.caller.run(
            scripts.CLAIM,
            keys.tag,
            [*keys.lanes, keys.workers, keys.known, keys.settles(dead)],
            (GROUP, dead, last_seen, claimer, count),
            retry_for=0.0,
        )
        return [
            Entry(lane, entry_id, message, int(deliveries))
            for lane, rows in zip(_PRIORITIES, reply, strict=True)
            for entry_id, message, deliveries in rows
        ]

    async def sweep(self) -> int:
        """List consumers that hold entries without a lease; returns how many."""
        keys = self.keys
        return int(await self.caller.run(scripts.SWEEP, keys.tag, [*keys.lanes, keys.workers], (GROUP,)))

    async def hand_back(
        self, worker: bytes, entries: Sequence[tuple[Priority, bytes]], to: bytes = RETURNED
    ) -> int:
        """Give entries that were not started back to the group, uncounted."""
        keys = self.keys
        arguments: list[Argument] = [GROUP, worker, to]
        for lane, entry in entries:
            arguments += (lane + 1, entry)
        return int(
            await self.caller.run(
                scripts.HAND_BACK,
                keys.tag,
                [*keys.lanes, keys.workers, keys.control],
                arguments,
                retry_for=2.0,
            )
        )

    async def promote(self, count: int) -> tuple[int, float | None]:
        """Move due messages to the streams; returns how many, and the seconds until the next is due."""
        moved, next_ms = await self.caller.run(
            scripts.PROMOTE, self.keys.tag, [*self.keys.lanes, self.keys.delayed], (count,)
        )
        return int(moved), None if next_ms < 0 else int(next_ms) / 1000

    async def cancel(
        self,
        message_id: str,
        lane: Priority,
        place: str | None,
        outcome: bytes,
        ttl_ms: int,
        blob_chunks: int = 0,
    ) -> Cancelled:
        """Cancel a message; ``place`` is what submit told of it."""
        keys = self.keys
        blobs = [keys.blob(message_id, "args", chunk) for chunk in range(blob_chunks)]
        reply = await self.caller.run(
            scripts.CANCEL,
            keys.tag,
            [
                *keys.lanes,
                keys.delayed,
                keys.cancelled,
                keys.control,
                keys.result(message_id),
                keys.replies(reply_producer(message_id)),
                *blobs,
            ],
            (GROUP, message_id, lane + 1, place or "", outcome, ttl_ms, CANCEL_MARK_TTL_MS),
        )
        return Cancelled(reply.decode())

    async def cancel_marks(self) -> list[str]:
        """The messages that someone wants cancelled and whose place is not known, from the oldest."""
        marks = await self.caller.command(self.keys.tag, "ZRANGE", self.keys.cancelled, -MAX_CANCEL_MARKS, -1)
        return [message_id.decode("ascii", "replace") for message_id in marks]

    async def result(self, message_id: str) -> bytes | None:
        """The outcome's record, while it lives."""
        data: bytes | None = await self.caller.command(self.keys.tag, "GET", self.keys.result(message_id))
        return data

    async def requeue(self, dead_key: bytes, entry: str, message: Message | None, data: bytes) -> bool:
        """Put a dead letter back (``data`` is its message's bytes) or, with empty data, discard it."""
        keys = self.keys
        lane = keys.lanes[message.priority if message else Priority.NORMAL]
        chunks = message.blob_chunks if message else 0
        blobs = [keys.blob(message.id, "args", chunk) for chunk in range(chunks)] if message else []
        message_id = message.id if message else ""
        return bool(
            await self.caller.run(
                scripts.REQUEUE,
                keys.tag,
                [dead_key, lane, keys.result(message_id), keys.cancelled, keys.control, *blobs],
                (entry, data, message_id),
            )
        )


def lane_quotas(total: int, turn: int) -> tuple[int, int, int]:
    """How many of ``total`` entries each lane may have before what is left over is shared out by priority.

    Smooth weighted round robin, 12 : 3 : 1, over the turns ``turn`` to ``turn + total``: a lane that floods never
    starves the others, and an urgent entry waits for one turn at most.
    """
    quotas = [0, 0, 0]
    whole, rest = divmod(total, len(_TURNS))
    for lane, weight in LANE_QUOTAS.items():
        quotas[lane] = whole * weight
    for step in range(rest):
        quotas[_TURNS[(turn + step) % len(_TURNS)]] += 1
    return quotas[0], quotas[1], quotas[2]


def _turns() -> tuple[Priority, ...]:
    credit = dict.fromkeys(LANE_QUOTAS, 0)
    order = []
    for _ in range(sum(LANE_QUOTAS.values())):
        for lane, weight in LANE_QUOTAS.items():
            credit[lane] += weight
        chosen = max(credit, key=lambda lane: credit[lane])
        credit[chosen] -= sum(LANE_QUOTAS.values())
        order.append(chosen)
    return tuple(order)


_TURNS = _turns()


def _extend(entries: list[Entry], lane: Priority, rows: Sequence[tuple[bytes, list[bytes] | None]]) -> None:
    entries += [Entry(lane, entry_id, fields[1] if fields else None, 1) for entry_id, fields in rows]


def read_fetched(reply: Sequence[Sequence[tuple[bytes, list[bytes] | None]]]) -> list[Entry]:
    """The entries of a ``fetch_command``'s reply."""
    entries: list[Entry] = []
    for lane, rows in zip(_PRIORITIES, reply, strict=True):
        _extend(entries, lane, rows)
    return entries
