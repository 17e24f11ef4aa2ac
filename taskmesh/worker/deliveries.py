"""What a worker holds: deliveries, by the partition that they came from."""

from __future__ import annotations

from collections.abc import Iterable, Set

import msgspec

from taskmesh.broker.streams import MAX_CANCEL_MARKS, Partition
from taskmesh.messages import Message, Priority
from taskmesh.tasks import TaskDefinition


class Delivery(msgspec.Struct, gc=False, eq=False):
    """One message in this worker's hands.

    Attributes:
        data: the message as it came; another try is made of this, whatever the handler does to its arguments.
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


class Source:
    """One partition that the worker serves, and what it holds of it.

    Attributes:
        held: by lane, entry id -> delivery (None while it is being refused) of everything not settled yet.
        cancelled: ids of messages that someone wants cancelled, the newest last; most of them never come here.
        last_control: how far the control stream was read.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.keys = partition.keys
        self.queue = partition.keys.queue
        self.held: tuple[dict[bytes, Delivery | None], ...] = tuple({} for _ in Priority)
        self.cancelled: dict[str, None] = {}
        self.last_control: bytes = b"0-0"

    def mark(self, message_ids: Iterable[str]) -> None:
        """Remember that these are to be cancelled; the oldest are forgotten beyond a bound."""
        self.cancelled.update(dict.fromkeys(message_ids))
        while len(self.cancelled) > MAX_CANCEL_MARKS:
            del self.cancelled[next(iter(self.cancelled))]

    def find(self, message_ids: Set[str]) -> list[Delivery]:
        """The held deliveries of these messages."""
        return [
            delivery
            for lane in self.held
            for delivery in lane.values()
            if delivery is not None and delivery.message.id in message_ids
        ]
