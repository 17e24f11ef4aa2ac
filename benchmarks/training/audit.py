"""What the ledger says of a run: which samples formed its last version, and whether each did so once a data epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

from taskmesh.training import LedgerEntry


def lineage(entries: Sequence[LedgerEntry], version: int) -> Iterator[LedgerEntry]:
    """The entries that a version was formed by, newest first: rolled back and abandoned ones are not among them."""
    by_version = {entry.version: entry for entry in entries}
    while version in by_version:
        entry = by_version[version]
        if entry.batch >= 0:
            yield entry
        version = entry.parent


async def account(
    entries: Sequence[LedgerEntry],
    version: int,
    samples: int,
    indices_of: Callable[[int], Awaitable[Sequence[int]]],
) -> dict[str, int]:
    """Samples committed twice, and never, in the data epochs of a version's history; the last may be unfinished."""
    steps = list(lineage(entries, version))
    seen: Counter[tuple[int, int]] = Counter()
    per_epoch = -(-samples // len(await indices_of(0)))
    for entry in steps:
        indices = await indices_of(entry.batch)
        shards = sorted(share.shard for share in entry.shares)
        if sum(entry.samples) != len(indices) or shards != list(range(len(entry.samples))):
            raise AssertionError(f"version {entry.version} was not formed by all of its batch: {entry}")
        seen.update((entry.batch // per_epoch, index) for index in indices)
    whole = {entry.batch // per_epoch for entry in steps if (entry.batch + 1) % per_epoch == 0}
    expected = {(epoch, index) for epoch in whole for index in range(samples)}
    return {
        "ledger_steps": len(steps),
        "committed_twice": sum(count - 1 for count in seen.values()),
        "never_committed": len(expected - seen.keys()),
    }
