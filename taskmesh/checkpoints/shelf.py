"""Chunks that lie there already: what is equal to an earlier checkpoint's chunk is not written again.

Only the same place of the same part is looked at: layers that are not trained, embeddings that a step did not touch,
a run that stands still. Pure.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from taskmesh.checkpoints.manifest import Loan, Part


def lend(part: Part, earlier: Part | None) -> Part:
    """The part with every loan that it can have from an earlier version's; none from nobody."""
    if earlier is None:
        return part
    held = zip(earlier.digests, earlier.places, strict=True)
    found = [
        where if digest == wanted else None
        for wanted, (digest, where) in zip(part.digests, held, strict=False)
    ]
    return replace(part, loans=_loans(found))


def without(part: Part, lost: Collection[int]) -> Part:
    """The part with these chunks its own, whoever lent them."""
    own = {*lost, *part.own}
    return replace(part, loans=_loans([None if at in own else where for at, where in enumerate(part.places)]))


def _loans(places: list[tuple[int, int, int] | None]) -> tuple[Loan, ...]:
    """The loans that bring each chunk from there; None is no loan. Neighbours become one."""
    loans: list[Loan] = []
    for place, where in enumerate(places):
        if where is None:
            continue
        version, token, index = where
        if loans and _continues(loans[-1], place, where):
            loans[-1] = replace(loans[-1], count=loans[-1].count + 1)
        else:
            loans.append(Loan(place, 1, version, token, index))
    return tuple(loans)


def _continues(loan: Loan, place: int, where: tuple[int, int, int]) -> bool:
    return (loan.place + loan.count, (loan.version, loan.token, loan.first + loan.count)) == (place, where)
