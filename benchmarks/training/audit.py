"""What the ledger says of a run: which samples formed its last version, and whether each did so once a data epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence

from taskmesh.training import LedgerEntry
from taskmesh.training.plan import Owed, split

IndicesOf = Callable[[int], Awaitable[Sequence[int]]]


def lineage(entries: Sequence[LedgerEntry], version: int) -> Iterator[LedgerEntry]:
    """The entries that a version was formed by, newest first: rolled back and abandoned ones are not among them."""
    by_version = {entry.version: entry for entry in entries}
    while version in by_version:
        entry = by_version[version]
        if entry.batch >= 0:
            yield entry
        version = entry.parent


def units(entry: LedgerEntry) -> dict[int, Owed]:
    """What each shard of an entry's plan is of, by its number: a batch, and a place among its shards."""
    if entry.base >= 0:
        return {share.shard: Owed(entry.batch, share.shard) for share in entry.shares}
    own = len(entry.samples) - len(entry.extra)
    return dict(enumerate([*(Owed(entry.batch, shard) for shard in range(own)), *entry.extra]))


async def account(
    entries: Sequence[LedgerEntry], version: int, samples: int, shards: int, indices_of: IndicesOf
) -> dict[str, int]:
    """Samples committed twice, and never, in the data epochs of a version's history; the last may be unfinished.

    What is owed at that version has time: it is counted apart.

    Args:
        shards: of each batch.
    """
    steps = list(lineage(entries, version))
    seen: Counter[tuple[int, int]] = Counter()
    per_epoch = -(-samples // len(await indices_of(0)))

    async def samples_of(unit: Owed) -> list[tuple[int, int]]:
        chosen = split(await indices_of(unit.batch), shards)[unit.shard]
        return [(unit.batch // per_epoch, index) for index in chosen]

    for entry in steps:
        planned = units(entry)
        lengths = dict(zip(planned, entry.samples, strict=True))
        came = sorted(share.shard for share in entry.shares)
        late = {unit for number, unit in planned.items() if number not in came}
        if len(came) + len(late) != len(planned) or not late <= set(entry.owed):
            raise AssertionError(
                f"version {entry.version} was formed by other shards than it should: {entry}"
            )
        for number in came:
            found = await samples_of(planned[number])
            if len(found) != lengths[number]:
                raise AssertionError(f"version {entry.version} was not formed by all of a shard: {entry}")
            seen.update(found)
    whole = {entry.batch // per_epoch for entry in steps if (entry.batch + 1) % per_epoch == 0}
    if (
        steps and steps[0].base >= 0
    ):  # the last batch of an epoch may be drawn before all of those before it are in
        whole = set(range(steps[0].drawn // per_epoch))
    expected = {(epoch, index) for epoch in whole for index in range(samples)}
    owed = {sample for unit in (steps[0].owed if steps else ()) for sample in await samples_of(unit)}
    return {
        "ledger_steps": len(steps),
        "committed_twice": sum(count - 1 for count in seen.values()) + len(owed & seen.keys()),
        "never_committed": len(expected - seen.keys() - owed),
        "owed": len(owed),
    }
