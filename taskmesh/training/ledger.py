"""The ledger: what formed each of a run's versions."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from taskmesh.errors import CheckpointError
from taskmesh.training.plan import Owed


class Share(NamedTuple):
    """Who contributed a shard: what the ledger says of it."""

    shard: int
    worker: str
    task_id: str
    samples: int


class LedgerEntry(msgspec.Struct, frozen=True):
    """What formed a version: the run's ledger has one for each commit, rollbacks included.

    Attributes:
        batch: the number of the batch, or of the first of several; -1 for a rollback.
        samples: of each shard of its plan, whether it came in time or not.
        parent: the version that it was formed from; of a rollback, the one restored.
        shares: shard, worker, task and samples of each contribution.
        anew: the shards whose compression remembers, and began with nothing.
        digest: of the parameters as they were committed (``Part.root``); empty for a rollback.
        without: the worker whose contributions were left out since version ``since``, where the parent was formed again
            so.
        extra: what the plan's last shards were of: shards that had come too late for earlier steps.
        owed: shards of batches drawn so far that had not entered a version, and were to.
        base: in an asynchronous run, the version whose parameters its gradient is of; its one share says which shard of
            the batch it was. Else -1: that of its parent.
        drawn: how many batches were drawn so far, those left out included.
    """

    version: int
    parent: int
    step: int
    batch: int
    samples: tuple[int, ...] = ()
    shares: tuple[Share, ...] = ()
    anew: tuple[int, ...] = ()
    digest: bytes = b""
    without: str = ""
    since: int = 0
    extra: tuple[Owed, ...] = ()
    owed: tuple[Owed, ...] = ()
    base: int = -1
    drawn: int = 0


encode_entry = msgspec.msgpack.Encoder().encode
_decode_entry = msgspec.msgpack.Decoder(LedgerEntry).decode


def decode_entry(data: bytes) -> LedgerEntry:
    """Read an entry of the ledger.

    Raises:
        CheckpointError: the bytes are not one.
    """
    try:
        return _decode_entry(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"an entry of the ledger is damaged: {error}") from None
