"""What a worker holds: deliveries, by the partition that they came from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Set

import msgspec

from taskmesh.broker.liveness import Steadiness
from taskmesh.broker.streams import MAX_CANCEL_MARKS, Partition
from taskmesh.messages import Message, Priority
from taskmesh.tasks import TaskDefinition


class Delivery(msgspec.Struct, gc=False, eq=False):
    """One message in this worker's hands.

    Attributes:
        data: the message as it came, its signature taken off; another try is made of this, whatever the handler does
            to its arguments.
        order: rises with every delivery that the worker receives.
        arrived: monotonic seconds.
    """

    source: Source
    lane: Priority
    entry: bytes
    data: bytes
    message: Message
    task: TaskDefinition
    deliveries: int
    order: int
    arrived: float

    def __repr__(self) -> str:
        """Without the arguments and the bytes."""
        return f"<Delivery {self.entry.decode()} of {self.message}>"


class Source:
    """One partition that the worker serves, and what it holds of it.

    Attributes:
        held: by lane, entry id -> delivery (only its order while it is being refused) of everything not settled yet.
        ending: how many of them have ended, and are being settled.
        cancelled: ids of messages that someone wants cancelled, the newest last; most of them never come here.
        last_control: how far the control stream was read.
        worker: this worker's name here. A worker that was struck off takes a new one.
        accounts: held by whoever compares or changes, over a call, what is held here and at the server.
        round_trip: seconds that the quickest answer to its fetcher took.
        steadiness: since when the server has answered this worker's heartbeats here.
    """

    def __init__(self, partition: Partition, ttl: float) -> None:
        self.worker = b""
        self.round_trip = 0.0
        self.accounts = asyncio.Lock()
        self.steadiness = Steadiness(ttl)
        self.partition = partition
        self.keys = partition.keys
        self.queue = partition.keys.queue
        self.held: tuple[dict[bytes, Delivery | int], ...] = tuple({} for _ in Priority)
        self.ending = 0
        self.cancelled: dict[str, None] = {}
        self.last_control: bytes = b"0-0"

    def mark(self, message_ids: Iterable[str]) -> None:
        """Remember that these are to be cancelled; the oldest are forgotten beyond a bound."""
        self.cancelled.update(dict.fromkeys(message_ids))
        while len(self.cancelled) > MAX_CANCEL_MARKS:
            del self.cancelled[next(iter(self.cancelled))]

    @property
    def in_hand(self) -> int:
        """Deliveries that have not ended."""
        return sum(map(len, self.held)) - self.ending

    def find(self, message_ids: Set[str]) -> list[Delivery]:
        """The held deliveries of these messages."""
        return [
            delivery
            for lane in self.held
            for delivery in lane.values()
            if isinstance(delivery, Delivery) and delivery.message.id in message_ids
        ]
