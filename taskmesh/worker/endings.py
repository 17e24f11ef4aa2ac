"""From what a run came to, to what the settle script is told."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
from typing import Any

import msgspec

from taskmesh.broker import blobs
from taskmesh.broker.streams import Settlement
from taskmesh.codec import (
    BlobClaim,
    decode_message,
    decode_outcome,
    encode_blob_outcome,
    encode_message,
    encode_outcome,
    encode_success,
)
from taskmesh.errors import BrokerError, DecodeError, InvalidArguments, PayloadTooLarge
from taskmesh.events import Ending
from taskmesh.keys import is_name, reply_producer
from taskmesh.messages import Entry, Failure, Outcome, Status
from taskmesh.settings import KIB, MeshSettings
from taskmesh.signing import Untrusted
from taskmesh.tasks import PassOn
from taskmesh.worker.deliveries import Delivery, Source
from taskmesh.worker.outcome import failure_of, judge
from taskmesh.worker.redact import redactor_of
from taskmesh.worker.settle import Settler
from taskmesh.worker.versions import misfit_pause, own_version, wire_ability

log = logging.getLogger("taskmesh.worker")
_SUCCEEDED = Status.SUCCEEDED.value
KEPT_OF_TOO_LARGE = 64 * KIB
PASS_PAUSE_MS = 50


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
        task = delivery.task
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
        self._succeeded(delivery, outcome, ttl_ms, ending)

    def succeeded_with(self, delivery: Delivery, outcome: bytes, seconds: float) -> None:
        """The handler returned in a process, which has encoded the outcome."""
        ending = Ending(delivery.task.name, _SUCCEEDED, seconds)
        ttl_ms = self._ttl_ms(delivery)
        if ttl_ms:
            self._succeeded(delivery, outcome, ttl_ms, ending)
        else:
            self._settle(delivery, "D", (), ending)

    def keeps_result(self, delivery: Delivery) -> bool:
        """Whether a record of its success is kept."""
        return self._ttl_ms(delivery) > 0

    def _succeeded(self, delivery: Delivery, outcome: bytes, ttl_ms: int, ending: Ending) -> None:
        message = delivery.message
        if len(outcome) > self._settings.inline_limit_bytes:
            self._upload(delivery, outcome, ttl_ms, ending.seconds)
            return
        keys, signer = delivery.source.keys, delivery.source.partition.signer
        if signer is not None:
            outcome = signer.sign_outcome(message.id, outcome)
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
        if isinstance(error, PassOn) and not final:
            self._passed_on(delivery, error.worker, seconds)
            return
        verdict = judge(error, message.attempt, task.options.retry, self._draw())
        if verdict.delay is not None and not final:
            self._retried(delivery, verdict.delay, seconds)
            return
        failure = failure_of(error, self._engine_files, redactor_of(task, message, delivery.data))
        self._failed(delivery, failure, verdict.reason, seconds)

    def failed_with(
        self, delivery: Delivery, outcome: bytes, delay: float | None, reason: str, seconds: float
    ) -> None:
        """The handler raised in a process, which has encoded the outcome and judged it.

        Args:
            delay: seconds until another try; None when it was the last.
        """
        failure = decode_outcome(outcome).failure
        if delay is not None:
            self._retried(delivery, delay, seconds)
        elif failure is not None:
            self._failed(delivery, failure, reason, seconds)

    def _retried(self, delivery: Delivery, delay: float, seconds: float) -> None:
        again = msgspec.structs.replace(decode_message(delivery.data), attempt=delivery.message.attempt + 1)
        signer = delivery.source.partition.signer
        data = encode_message(again)
        arguments = (data if signer is None else signer.sign(data), int(delay * 1000))
        ending = Ending(delivery.task.name, Status.RETRIED.value, seconds)
        self._settle(delivery, "R", arguments, ending, keep_blobs=True)

    def _passed_on(self, delivery: Delivery, worker: str, seconds: float) -> None:
        signer = delivery.source.partition.signer
        data = delivery.data if signer is None else signer.sign(delivery.data)
        ending = Ending(delivery.task.name, Status.PASSED_ON.value, seconds)
        self._settle(delivery, "P", (worker, data, PASS_PAUSE_MS), ending, keep_blobs=True)

    def _failed(self, delivery: Delivery, failure: Failure, reason: str, seconds: float) -> None:
        name, message = delivery.task.name, delivery.message
        log.warning("task %s (%s) failed: %s: %s", name, message.id, failure.type, failure.message)
        outcome = encode_outcome(Outcome(Status.FAILED, failure=failure))
        self._with_outcome(delivery, "F", outcome, Status.FAILED, seconds, reason)

    def died(self, delivery: Delivery, text: str | None = None) -> None:
        """Too many have died with the message: workers, unless ``text`` says otherwise."""
        text = text or f"{delivery.deliveries - 1} workers died with this message in hand"
        error = RuntimeError(text)
        outcome = encode_outcome(Outcome(Status.FAILED, failure=failure_of(error, ())))
        log.error("task %s (%s): %s", delivery.task.name, delivery.message.id, text)
        self._with_outcome(delivery, "F", outcome, Status.FAILED, 0.0, "worker died")

    def dropped(self, delivery: Delivery, status: Status, seconds: float = 0.0) -> None:
        """Cancelled, or expired before it started."""
        self._with_outcome(delivery, "C", encode_outcome(Outcome(status)), status, seconds)

    def unreadable(self, delivery: Delivery, error: DecodeError) -> None:
        """The arguments beside the message are gone, or not what they should be."""
        reason = _why_unread(error)
        log.error("task %s (%s): %s", delivery.task.name, delivery.message.id, reason)
        outcome = encode_outcome(Outcome(Status.FAILED, failure=failure_of(error, ())))
        self._with_outcome(delivery, "F", outcome, Status.FAILED, 0.0, reason)

    def refused(self, source: Source, entry: Entry, order: int, error: DecodeError) -> None:
        """The entry cannot be read; one that was deleted under the worker is acknowledged alone."""
        kind: str = "D"
        arguments: tuple[str | int, ...] = ()
        if entry.message is not None:
            reason = _why_unread(error)
            kept = len(entry.message)
            if kept > source.partition.max_payload_bytes:
                kept = min(KEPT_OF_TOO_LARGE, source.partition.max_payload_bytes)
                reason += f"; its first {kept:,} bytes are kept"
            log.warning("queue %s: entry %s is refused: %s", source.queue, entry.id.decode(), reason)
            kind, arguments = "G", (reason, kept)
        self._settlers[source].add(
            entry.lane,
            Settlement(entry.id, kind, order, arguments=arguments),
            Ending("", Status.UNDECODABLE.value, 0.0),
        )

    def unknown(self, source: Source, entry: Entry, order: int, task: str) -> None:
        """No such task here: given to a worker that knows it, or parked."""
        if not is_name(task):
            self.refused(source, entry, order, DecodeError("the name of the task is damaged"))
            return
        self._settlers[source].add(
            entry.lane,
            Settlement(entry.id, "U", order, arguments=(task,)),
            Ending(task, Status.UNKNOWN.value, 0.0),
        )

    def other_version(self, source: Source, entry: Entry, order: int, version: int) -> None:
        """Of a wire version that is not read here: given to a worker that reads it, or parked."""
        self._settlers[source].add(
            entry.lane,
            Settlement(entry.id, "U", order, arguments=(wire_ability(version),)),
            Ending("", Status.UNKNOWN.value, 0.0),
        )

    def misfit(self, delivery: Delivery, error: InvalidArguments, patience: float) -> None:
        """The arguments do not fit the handler here: they wait for one that takes them, or fail at last.

        At the second meeting with the same signature the message is given to a worker that has another. Not at the
        first: two signatures of which neither fits would hand it to and fro.
        """
        task, message = delivery.task, delivery.message
        pause = misfit_pause(message.misfits, patience)
        if pause is None:
            self.failed(delivery, error, 0.0, final=True)
            return
        fingerprint = task.signature.fingerprint
        again = msgspec.structs.replace(
            decode_message(delivery.data), misfits=message.misfits + 1, unfit=fingerprint
        )
        signer = delivery.source.partition.signer
        data = encode_message(again)
        arguments = (data if signer is None else signer.sign(data), int(pause * 1000))
        text = failure_of(error, (), redactor_of(task, message, delivery.data)).message
        log.warning("%s (%s): it waits for a worker of another version", text, message.id)
        ending = Ending(task.name, Status.UNKNOWN.value, 0.0)
        if message.unfit == fingerprint:
            who = (task.name, own_version(task))
            self._settle(delivery, "W", (*who, *arguments), ending, keep_blobs=True)
        else:
            self._settle(delivery, "R", arguments, ending, keep_blobs=True)

    def _with_outcome(
        self,
        delivery: Delivery,
        kind: str,
        outcome: bytes,
        status: Status,
        seconds: float,
        *more: str,
        written: tuple[bytes, ...] = (),
    ) -> None:
        message, keys, signer = delivery.message, delivery.source.keys, delivery.source.partition.signer
        if signer is not None:
            outcome = signer.sign_outcome(message.id, outcome)
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
                written,
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
        digest = b"" if partition.signer is None else partition.signer.digest(outcome[3:])
        run = secrets.token_hex(4)
        pause = 0.05
        chunks = 0
        while not chunks:
            try:
                chunks = await blobs.upload(
                    partition, message.id, blobs.result_kind(run), outcome[3:], ttl_ms
                )
            except BrokerError as error:  # full or away: the result waits until there is room for it
                log.warning("the result of %s waits: %s", message.id, error)
                await asyncio.sleep(pause)
                pause = min(2.0, pause * 2)
        claim = encode_blob_outcome(Status.SUCCEEDED, BlobClaim(chunks, digest, run))
        keys = blobs.chunk_keys(partition, message.id, blobs.result_kind(run), chunks)
        self._with_outcome(delivery, "S", claim, Status.SUCCEEDED, seconds, written=tuple(keys))


def _why_unread(error: DecodeError) -> str:
    return f"{'not trusted' if isinstance(error, Untrusted) else 'undecodable'}: {error}"
