"""What happens to a delivery between its arrival and its turn: decoded, sorted out, its arguments fetched."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from taskmesh import codec
from taskmesh.broker import blobs
from taskmesh.errors import BrokerError, DecodeError
from taskmesh.events import Fetched, Observers
from taskmesh.keys import SUSPECTS
from taskmesh.messages import Entry, Status
from taskmesh.tasks import Registry
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.endings import Endings
from taskmesh.worker.execute import Executor

log = logging.getLogger("taskmesh.worker")
MANY_DEATHS = 2
HandBack = Callable[[Sequence[Delivery], bytes], Awaitable[None]]


class Intake:
    """Looks at what was fetched or claimed: queues what can run, ends what cannot."""

    def __init__(
        self,
        registry: Registry,
        endings: Endings,
        executor: Executor,
        observers: Observers,
        hand_back: HandBack,
    ) -> None:
        self._get_task = registry.get
        self._endings = endings
        self._executor = executor
        self._observers = observers
        self._hand_back = hand_back
        self._order = 0
        self._suspect: Delivery | None = None
        self._downloads: set[asyncio.Task[None]] = set()
        self._errands: set[asyncio.Task[None]] = set()

    @property
    def tasks(self) -> list[asyncio.Task[None]]:
        """What is under way for deliveries that have not had their turn."""
        return [*self._downloads, *self._errands]

    def take_in(self, source: Source, entries: Sequence[Entry], now_ms: int) -> None:
        """Look at deliveries and queue them; what cannot run is ended here.

        Args:
            now_ms: Redis time of their delivery.
        """
        now = time.monotonic()
        accept = self._executor.accept
        set_aside: list[Delivery] = []
        order = self._order
        for entry in entries:
            order += 1
            held = source.held[entry.lane]
            held[entry.id] = None
            data = entry.message or b""
            try:
                message = codec.decode_message(data)
            except DecodeError as error:
                name = codec.peek_task(data)
                if name is not None and self._get_task(name) is None:
                    # Values of types that this process lacks, for a task that is not its business either.
                    self._endings.unknown(source, entry, order, name)
                else:
                    self._endings.refused(source, entry, order, str(error))
                continue
            task = self._get_task(message.task)
            if task is None:
                self._endings.unknown(source, entry, order, message.task)
                continue
            delivery = Delivery(
                source, entry.lane, entry.id, data, message, task, entry.deliveries, order, now
            )
            held[entry.id] = delivery
            if source.cancelled and message.id in source.cancelled:
                del source.cancelled[message.id]
                self._endings.dropped(delivery, Status.CANCELLED)
            elif message.expires_at_ms and _has_expired(delivery, now_ms):
                self._endings.dropped(delivery, Status.EXPIRED)
            elif entry.deliveries > task.options.max_deliveries:
                self._endings.died(delivery)
            elif entry.deliveries > 1 and self._is_one_too_many(delivery):
                set_aside.append(delivery)
            elif message.blob_chunks:
                self._keep(self._downloads, self._fill_in(delivery))
            else:
                accept(delivery)
        self._order = order
        if set_aside:
            self._keep(self._errands, self._hand_back(set_aside, SUSPECTS))
        self._observers.emit(Fetched(source.queue, len(entries)))
        self._executor.dispatch()

    def _keep(self, tasks: set[asyncio.Task[None]], work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    def cancel(self, source: Source, message_ids: Sequence[str]) -> None:
        """Someone wants messages cancelled: stop them, or remember until they come."""
        stopped = {
            delivery.message.id
            for delivery in source.find(frozenset(message_ids))
            if self._executor.cancel(delivery)
        }
        source.mark(message_id for message_id in message_ids if message_id not in stopped)

    # messages that workers died with

    @property
    def has_suspect(self) -> bool:
        """Whether a message that two workers died with is in this worker's hands."""
        suspect = self._suspect
        return suspect is not None and suspect.entry in suspect.source.held[suspect.lane]

    def _is_one_too_many(self, delivery: Delivery) -> bool:
        """Whether the next death would condemn the message and another such message is in this worker's hands.

        One at a time, so that a death condemns none but the one that was here: of the messages that were in flight
        beside a killer, each gets to run without it.
        """
        deaths, most = delivery.deliveries - 1, delivery.task.options.max_deliveries
        if deaths < min(MANY_DEATHS, most - 1):
            return False
        if self.has_suspect:
            return True
        self._suspect = delivery
        return False

    # arguments beside the message

    def stop_downloads(self) -> None:
        """Give up fetching arguments: their deliveries go back, or are others' already."""
        for download in list(self._downloads):
            download.cancel()

    async def _fill_in(self, delivery: Delivery) -> None:
        message = delivery.message
        data: bytes | None = None
        try:
            while data is None:
                try:
                    data = await blobs.download(
                        delivery.source.partition, message.id, "args", message.blob_chunks
                    )
                except BrokerError as error:
                    log.debug("the arguments of %s wait: %s", message.id, error)
                    await asyncio.sleep(0.1)
            args, kwargs = codec.unpack_value(data)
        except (DecodeError, TypeError, ValueError) as error:
            self._endings.failed(delivery, error, 0.0, final=True)
            return
        if message.id in delivery.source.cancelled:
            del delivery.source.cancelled[message.id]
            self._endings.dropped(delivery, Status.CANCELLED)
            return
        delivery.message = msgspec.structs.replace(message, args=tuple(args), kwargs=kwargs)
        self._executor.accept(delivery)
        self._executor.dispatch()


def _has_expired(delivery: Delivery, now_ms: int) -> bool:
    """Expiry is about starting: what started once, and comes back, runs."""
    message = delivery.message
    return message.expires_at_ms <= now_ms and message.attempt == 1 and delivery.deliveries == 1
