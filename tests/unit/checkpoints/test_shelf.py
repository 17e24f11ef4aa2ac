"""What is not written again, because an earlier checkpoint has it at the same place."""

from __future__ import annotations

from taskmesh.checkpoints.manifest import CHUNK_BYTES, Loan, Manifest, Part
from taskmesh.checkpoints.shelf import lend, without
from taskmesh.keys import RunKeys

RUN = RunKeys("shop", "digits")


def part(version: int, digests: str, loans: tuple[Loan, ...] = ()) -> Part:
    size = CHUNK_BYTES * (len(digests) - 1) + 5
    return Part(True, version, 1, 0, size, tuple(letter.encode() for letter in digests), loans)


def kept(version: int, parameters: Part) -> Manifest:
    return Manifest(version, version - 1, version, version, 1, True, "", {"parameters": parameters})


def test_equal_chunks_at_the_same_place_are_borrowed_in_runs() -> None:
    found = lend(part(9, "abXde"), part(3, "abcde"))
    assert found.loans == (Loan(0, 2, 3, 1, 0), Loan(3, 2, 3, 1, 3))
    assert found.own == [2]
    assert found.keys(RUN) == [
        RUN.chunk(3, 1, 0),
        RUN.chunk(3, 1, 1),
        RUN.chunk(9, 1, 2),
        RUN.chunk(3, 1, 3),
        RUN.chunk(3, 1, 4),
    ]


def test_places_do_not_mix_and_lengths_may_differ() -> None:
    assert not lend(part(9, "ba"), part(3, "ab")).loans
    assert lend(part(9, "ab"), part(3, "a")).loans == (Loan(0, 1, 3, 1, 0),)
    assert lend(part(9, "a"), part(3, "ab")).loans == (Loan(0, 1, 3, 1, 0),)


def test_a_loan_is_not_passed_on_but_traced_to_its_owner() -> None:
    second = part(4, "aY", (Loan(0, 1, 3, 1, 0),))
    assert lend(part(9, "aY"), second).loans == (Loan(0, 1, 3, 1, 0), Loan(1, 1, 4, 1, 1))


def test_nothing_is_borrowed_from_nobody() -> None:
    assert lend(part(9, "abc"), None) == part(9, "abc")
    assert lend(Part(True, 9, 1, 0, 0, ()), part(3, "abc")).loans == ()


def test_chunks_that_were_lost_become_its_own() -> None:
    found = without(lend(part(9, "abcd"), part(3, "abcd")), [1, 3])
    assert found.loans == (Loan(0, 1, 3, 1, 0), Loan(2, 1, 3, 1, 2))
    assert found.own == [1, 3]
    assert without(found, []) == found


def test_what_was_written_is_counted() -> None:
    assert part(9, "abc").own_bytes == 2 * CHUNK_BYTES + 5
    assert lend(part(9, "abX"), part(3, "abc")).own_bytes == 5
    assert lend(part(9, "Xbc"), part(3, "abc")).own_bytes == CHUNK_BYTES
    manifest = kept(9, lend(part(9, "Xbc"), part(3, "abc")))
    assert (manifest.size_bytes, manifest.written_bytes) == (2 * CHUNK_BYTES + 5, CHUNK_BYTES)
    again = kept(10, manifest.parts["parameters"])
    assert again.written_bytes == 0, "a rollback's"
