"""Versions of before, in the replay of an asynchronous run: the gradients of later ones are of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from taskmesh.errors import CheckpointError
from taskmesh.training.ledger import LedgerEntry
from taskmesh.training.step.progress import Past


def keep(past: Mapping[int, Past], staleness: int, version: int, new: Past) -> dict[int, Past]:
    """The versions that gradients may still be of, when there is a new one."""
    return {each: was for each, was in past.items() if was.step >= new.step - staleness} | {version: new}


def find(past: Mapping[int, Past], entry: LedgerEntry) -> Past:
    """The version that the gradient of an entry is of.

    Raises:
        CheckpointError: it is not there.
    """
    if entry.base not in past:
        raise _unknown(entry)
    return past[entry.base]


def check_bases(way: Sequence[LedgerEntry]) -> None:
    """See that every gradient of an asynchronous run is of a version on the way, or of the one where it begins.

    Raises:
        CheckpointError: one is not.
    """
    known = {way[0].parent} if way else set()
    for entry in way:
        if entry.batch < 0:
            known.clear()
        elif entry.base not in known:
            raise _unknown(entry)
        known.add(entry.version)


def _unknown(entry: LedgerEntry) -> CheckpointError:
    return CheckpointError(
        f"version {entry.version} cannot be formed again from there: its gradient is of version {entry.base}, and no "
        "version is kept (any more) at which nothing was under way: the run's first, or one that it went back to or on "
        "from"
    )
