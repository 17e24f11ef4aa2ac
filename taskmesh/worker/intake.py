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
from taskmesh.messages import Entry, Message, Status
from taskmesh.signing import Untrusted, digest_of
from taskmesh.tasks import Registry
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.endings import Endings
from taskmesh.worker.execute import Executor
from taskmesh.worker.processes import Processes, is_suspect

log = logging.getLogger("taskmesh.worker")
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
        processes: Processes,
    ) -> None:
        self._get_task = registry.get
        self._endings = endings
        self._executor = executor
        self._observers = observers
        self._hand_back = hand_back
        self._processes = processes
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
        signer, limit = source.partition.signer, source.partition.max_payload_bytes
        set_aside: list[Delivery] = []
        order = self._order
        for entry in entries:
            order += 1
            held = source.held[entry.lane]
            held[entry.id] = order
            data = entry.message or b""
            try:
                if len(data) > limit:
                    raise DecodeError(_too_large(f"it has {len(data):,} bytes", limit))
                if signer is not None:
                    data = signer.read(data)
                message = codec.decode_message(data)
                if message.blob_chunks > 1 and message.blob_chunks > blobs.chunk_count(limit):
                    raise DecodeError(_too_large(f"its arguments claim {message.blob_chunks:,} MiB", limit))
            except DecodeError as error:
                self._turn_away(source, entry, order, data, error)
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
            elif entry.deliveries > 1 and entry.deliveries > self._processes.most_deliveries(delivery):
                self._endings.died(delivery)
            elif entry.deliveries > 1 and self._is_one_too_many(delivery):
                set_aside.append(delivery)
            elif message.blob_chunks:
                self._keep(self._downloads, self._fill_in(delivery))
            else:
                accept(delivery)
        self._order = order
        if set_aside:
            self.set_aside(set_aside)
        self._observers.emit(Fetched(source.queue, len(entries)))
        self._executor.dispatch()

    def set_aside(self, deliveries: Sequence[Delivery]) -> None:
        """Let suspect messages wait until a worker has room to run them apart from the others."""
        self._keep(self._errands, self._hand_back(deliveries, SUSPECTS))

    def _turn_away(self, source: Source, entry: Entry, order: int, data: bytes, error: DecodeError) -> None:
        """End a delivery that cannot be read here."""
        version = codec.version_of(data) if len(data) <= source.partition.max_payload_bytes else None
        if version is not None and version not in source.partition.wire_versions:
            self._endings.other_version(source, entry, order, version)
            return
        trusted = not isinstance(error, Untrusted) and len(data) <= source.partition.max_payload_bytes
        name = codec.peek_task(data) if trusted else None
        if name is not None and self._get_task(name) is None:
            # Values of types that this process lacks, for a task that is not its business either.
            self._endings.unknown(source, entry, order, name)
        else:
            self._endings.refused(source, entry, order, error)

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
    def room_for_suspects(self) -> int:
        """How many messages that two workers died with are welcome now."""
        room = max(0, self._executor.isolated.room_for_suspects)
        return room if self._processes.takes_any else min(room, 0 if self._has_suspect else 1)

    @property
    def _has_suspect(self) -> bool:
        """Whether one that cannot run in a process is in this worker's hands."""
        suspect = self._suspect
        # The same delivery, that is: one that was handed back may come again, and is another then.
        return suspect is not None and suspect.source.held[suspect.lane].get(suspect.entry) is suspect

    def _is_one_too_many(self, delivery: Delivery) -> bool:
        """Whether the next death would condemn the message, and there is no room to run it apart from the others.

        In processes there is room for some. Where no process can import the handler, they run in the worker one at a
        time, so that a death condemns none but the one that was here: of the messages that were in flight beside a
        killer, each gets to run without it.
        """
        if delivery.task.options.process or not is_suspect(delivery):
            return False
        if self._processes.take(delivery):
            return self._executor.isolated.room_for_suspects < 1
        if self._has_suspect:
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
            args, kwargs = _arguments(message, data)
        except DecodeError as error:
            self._endings.unreadable(delivery, error)
            return
        if message.id in delivery.source.cancelled:
            del delivery.source.cancelled[message.id]
            self._endings.dropped(delivery, Status.CANCELLED)
            return
        if delivery.source.held[delivery.lane].get(delivery.entry) is not delivery:
            return  # lost with the lease meanwhile
        delivery.message = msgspec.structs.replace(message, args=tuple(args), kwargs=kwargs)
        self._executor.accept(delivery)
        self._executor.dispatch()


def _arguments(message: Message, data: bytes) -> tuple[list[object], dict[str, object]]:
    """The arguments in a blob.

    Raises:
        DecodeError: it is damaged, or not the one that the message was signed with.
    """
    if message.blob_digest and digest_of(data) != message.blob_digest:
        raise Untrusted("the arguments beside the message are not those that were signed")
    content = codec.unpack_value(data)
    if type(content) is list and len(content) == 2:
        args, kwargs = content
        if type(args) is list and type(kwargs) is dict and all(type(name) is str for name in kwargs):
            return args, kwargs
    raise DecodeError("the arguments beside the message are damaged")


def _too_large(what: str, limit: int) -> str:
    return f"{what}; the limit is {limit:,} bytes (MeshSettings.max_payload_bytes)"


def _has_expired(delivery: Delivery, now_ms: int) -> bool:
    """Expiry is about starting: what started once, and comes back, runs."""
    message = delivery.message
    return message.expires_at_ms <= now_ms and message.attempt == 1 and delivery.deliveries == 1
