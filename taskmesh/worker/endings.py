"""From what a run came to, to what the settle script is told."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import Any

import msgspec

from taskmesh.broker import blobs
from taskmesh.broker.streams import Settlement
from taskmesh.codec import (
    decode_message,
    encode_blob_outcome,
    encode_message,
    encode_outcome,
    encode_success,
)
from taskmesh.errors import BrokerError, PayloadTooLarge
from taskmesh.events import Ending
from taskmesh.keys import reply_producer
from taskmesh.messages import Entry, Outcome, Status
from taskmesh.settings import MeshSettings
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.outcome import failure_of, judge
from taskmesh.worker.settle import Settler

log = logging.getLogger("taskmesh.worker")
_SUCCEEDED = Status.SUCCEEDED.value


class Endings:
    """Turns what became of a delivery into a settlement, and hands it to the partition's settler."""

    def __init__(self, settings: MeshSettings, engine_files: tuple[str, ...]) -> None:
        self._settings = settings
        self._engine_files = engine_files
        self._settlers: dict[Source, Settler] = {}
        self._uploads: set[asyncio.Task[None]] = set()
        self._draw = random.Random().random

    def serve(self, source: Source, settler: Settler) -> None:
        """Let deliveries of a partition be settled by ``settler``."""
        self._settlers[source] = settler

    async def drained(self) -> None:
        """Return when all that ended so far is settled."""
        while self._uploads:
            await asyncio.wait(self._uploads)
        for settler in self._settlers.values():
            await settler.drained()

    def close(self) -> None:
        """Settle nothing more."""
        for upload in self._uploads:
            upload.cancel()
        for settler in self._settlers.values():
            settler.close()

    def succeeded(self, delivery: Delivery, value: Any, seconds: float) -> None:
        """The handler returned."""
        task, message = delivery.task, delivery.message
        ttl_ms = self._ttl_ms(delivery)
        ending = Ending(task.name, _SUCCEEDED, seconds)
        if not ttl_ms:
            self._settle(delivery, "D", (), ending)
            return
        try:
            outcome = encode_success(value)
        except Exception as error:  # whatever a user's own type raises on its way to the wire
            raised = TypeError(f"the result of task {task.name!r} cannot travel: {error}")
            self.failed(delivery, raised, seconds, final=True)
            return
        if len(outcome) > self._settings.inline_limit_bytes:
            self._upload(delivery, outcome, ttl_ms, seconds)
            return
        keys = delivery.source.keys
        self._settlers[delivery.source].add(
            delivery.lane,
            Settlement(
                delivery.entry,
                "S",
                delivery.order,
                keys.result(message.id),
                keys.replies(reply_producer(message.id)),
                (outcome, ttl_ms),
                self._blobs(delivery),
            ),
            ending,
        )

    def failed(
        self, delivery: Delivery, error: BaseException, seconds: float, *, final: bool = False
    ) -> None:
        """The handler raised, or could not be called; ``final`` rules out another try."""
        task, message = delivery.task, delivery.message
        verdict = judge(error, message.attempt, task.options.retry, self._draw())
        if verdict.delay is not None and not final:
            again = msgspec.structs.replace(decode_message(delivery.data), attempt=message.attempt + 1)
            arguments = (encode_message(again), int(verdict.delay * 1000))
            self._settle(
                delivery, "R", arguments, Ending(task.name, Status.RETRIED.value, seconds), keep_blobs=True
            )
            return
        failure = failure_of(error, self._engine_files)
        log.warning("task %s (%s) failed: %s: %s", task.name, message.id, failure.type, failure.message)
        outcome = encode_outcome(Outcome(Status.FAILED, failure=failure))
        self._with_outcome(delivery, "F", outcome, Status.FAILED, seconds, verdict.reason)

    def died(self, delivery: Delivery) -> None:
        """The workers that had the message died too often."""
        text = f"{delivery.deliveries - 1} workers died with this message in hand"
        error = RuntimeError(text)
        outcome = encode_outcome(Outcome(Status.FAILED, failure=failure_of(error, ())))
        log.error("task %s (%s): %s", delivery.task.name, delivery.message.id, text)
        self._with_outcome(delivery, "F", outcome, Status.FAILED, 0.0, "worker died")

    def dropped(self, delivery: Delivery, status: Status, seconds: float = 0.0) -> None:
        """Cancelled, or expired before it started."""
        self._with_outcome(delivery, "C", encode_outcome(Outcome(status)), status, seconds)

    def refused(self, source: Source, entry: Entry, order: int, reason: str) -> None:
        """The entry cannot be decoded; one that was deleted under the worker is acknowledged alone."""
        kind, arguments = ("D", ()) if entry.message is None else ("G", (f"undecodable: {reason}",))
        self._settlers[source].add(
            entry.lane,
            Settlement(entry.id, kind, order, arguments=arguments),
            Ending("", Status.UNDECODABLE.value, 0.0),
        )

    def unknown(self, source: Source, entry: Entry, order: int, task: str) -> None:
        """No such task here: given to a worker that knows it, or parked."""
        self._settlers[source].add(
            entry.lane,
            Settlement(entry.id, "U", order, arguments=(task,)),
            Ending(task, Status.UNKNOWN.value, 0.0),
        )

    def _with_outcome(
        self, delivery: Delivery, kind: str, outcome: bytes, status: Status, seconds: float, *more: str
    ) -> None:
        message, keys = delivery.message, delivery.source.keys
        self._settlers[delivery.source].add(
            delivery.lane,
            Settlement(
                delivery.entry,
                kind,
                delivery.order,
                keys.result(message.id),
                keys.replies(reply_producer(message.id)),
                (outcome, self._ttl_ms(delivery), *more),
                () if kind == "F" else self._blobs(delivery),
            ),
            Ending(delivery.task.name, status.value, seconds),
        )

    def _settle(
        self,
        delivery: Delivery,
        kind: str,
        arguments: tuple[bytes | str | int | float, ...],
        ending: Ending,
        keep_blobs: bool = False,
    ) -> None:
        self._settlers[delivery.source].add(
            delivery.lane,
            Settlement(
                delivery.entry,
                kind,
                delivery.order,
                arguments=arguments,
                blobs=() if keep_blobs else self._blobs(delivery),
            ),
            ending,
        )

    def _blobs(self, delivery: Delivery) -> tuple[bytes, ...]:
        chunks = delivery.message.blob_chunks
        if not chunks:
            return ()
        return tuple(blobs.chunk_keys(delivery.source.partition, delivery.message.id, "args", chunks))

    def _ttl_ms(self, delivery: Delivery) -> int:
        if delivery.message.result_ttl_ms >= 0:
            return delivery.message.result_ttl_ms
        ttl = delivery.task.options.result_ttl
        return int((self._settings.result_ttl if ttl is None else ttl) * 1000)

    def _upload(self, delivery: Delivery, outcome: bytes, ttl_ms: int, seconds: float) -> None:
        if len(outcome) > self._settings.max_payload_bytes:
            limit = self._settings.max_payload_bytes
            error = PayloadTooLarge(
                f"the result has {len(outcome):,} bytes; the limit is {limit:,} "
                "(MeshSettings.max_payload_bytes)"
            )
            self.failed(delivery, error, seconds, final=True)
            return
        upload = asyncio.create_task(
            self._upload_and_settle(delivery, outcome, ttl_ms, seconds), name="taskmesh result upload"
        )
        self._uploads.add(upload)
        upload.add_done_callback(self._uploads.discard)

    async def _upload_and_settle(
        self, delivery: Delivery, outcome: bytes, ttl_ms: int, seconds: float
    ) -> None:
        partition, message = delivery.source.partition, delivery.message
        pause = 0.05
        chunks = 0
        while not chunks:
            try:
                chunks = await blobs.upload(partition, message.id, "result", outcome[3:], ttl_ms)
            except BrokerError as error:  # full or away: the result waits until there is room for it
                log.warning("the result of %s waits: %s", message.id, error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
        self._with_outcome(
            delivery, "S", encode_blob_outcome(Status.SUCCEEDED, chunks), Status.SUCCEEDED, seconds
        )
