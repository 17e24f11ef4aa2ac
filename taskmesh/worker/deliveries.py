"""What a worker holds: deliveries, by the partition that they came from."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from taskmesh.broker.streams import Partition
from taskmesh.messages import Message, Priority
from taskmesh.tasks import TaskDefinition


class Delivery(msgspec.Struct, gc=False, eq=False):
    """One message in this worker's hands.

    Attributes:
        order: rises with every delivery that the worker receives.
        arrived: monotonic seconds.
    """

    source: Source
    lane: Priority
    entry: bytes
    message: Message
    task: TaskDefinition
    deliveries: int
    order: int
    arrived: float


class Source:
    """One partition that the worker serves, and what it holds of it.

    Attributes:
        held: by lane, entry id -> delivery (None while it is being refused) of everything not settled yet.
        cancelled: ids of messages that someone wants cancelled.
        last_control: how far the control stream was read.
    """

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.keys = partition.keys
        self.queue = partition.keys.queue
        self.held: tuple[dict[bytes, Delivery | None], ...] = tuple({} for _ in Priority)
        self.cancelled: set[str] = set()
        self.last_control: bytes = b"0-0"

    def find(self, message_id: str) -> Iterator[Delivery]:
        """The held deliveries of a message (more than one only if it was submitted twice)."""
        for lane in self.held:
            for delivery in lane.values():
                if delivery is not None and delivery.message.id == message_id:
                    yield delivery
