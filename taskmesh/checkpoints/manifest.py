"""What a version is: where its chunks lie, and what they must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from taskmesh.broker import chunks
from taskmesh.broker.chunks import CHUNK_BYTES
from taskmesh.errors import CheckpointError
from taskmesh.keys import RunKeys

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Loan:
    """Chunks of a part that an earlier version wrote, and that are not written again.

    Attributes:
        place, count: which of the part's chunks.
        version, token, first: where they lie, as in ``Part``.
    """

    place: int
    count: int
    version: int
    token: int
    first: int


@dataclass(frozen=True, slots=True)
class Part:
    """One value of a version ("parameters", "state"), as the chunks that hold it.

    The chunks are named by the version and token that wrote them, which are another's where a rollback made an
    older version's chunks current again, and for chunks on loan.

    Attributes:
        kept: on the durable server; else on the one for values that can be formed again.
        first: index of its first chunk within the version that wrote it.
        digests: of each chunk, 16 bytes: blake2b where it is kept, else XXH3, which finds damage as well, ten times as
            fast, and only does not withstand an adversary.
        loans: chunks that are another version's, in order.
    """

    kept: bool
    version: int
    token: int
    first: int
    size_bytes: int
    digests: tuple[bytes, ...]
    loans: tuple[Loan, ...] = ()

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Version, token and index of each chunk, in order."""
        places = [(self.version, self.token, self.first + place) for place in range(len(self.digests))]
        for loan in self.loans:
            lent = range(loan.first, loan.first + loan.count)
            places[loan.place : loan.place + loan.count] = [(loan.version, loan.token, at) for at in lent]
        return places

    @property
    def own(self) -> list[int]:
        """Which chunks were written for it: all that are not on loan."""
        lent = {place for loan in self.loans for place in range(loan.place, loan.place + loan.count)}
        return [place for place in range(len(self.digests)) if place not in lent]

    @property
    def own_bytes(self) -> int:
        """Bytes of the chunks that were written for it."""
        last = len(self.digests) - 1
        return sum(
            self.size_bytes - CHUNK_BYTES * last if place == last else CHUNK_BYTES for place in self.own
        )

    def keys(self, run: RunKeys) -> list[bytes]:
        """The chunks' keys, in order."""
        name = run.chunk if self.kept else run.transient
        return [name(*place) for place in self.places]

    def own_keys(self, run: RunKeys) -> list[bytes]:
        """The keys of the chunks that were written for it."""
        keys = self.keys(run)
        return [keys[place] for place in self.own]

    @property
    def root(self) -> bytes:
        """One digest over all."""
        return root_of(self.digests)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a run.

    Every version has one while it is current. A version that is kept has a second one, which appears when all of it
    is written, and stays.

    Attributes:
        version: rises with every commit of the run, rollbacks and replays included.
        parent: the version that it was formed from; its own for the first.
        step: updates that its parameters have seen.
        batch: batches that were drawn from the sampler, skipped ones included.
        token: the fencing token of the master that wrote it.
        kept: a checkpoint, with all that a run needs to go on.
        layout: digest of the parameters' layout.
        parts: by name; "parameters" always, and "update" where only that was written, which leads to the parameters
            from the parent's; where it is kept also "tensors", "state" and "index", and "memory.<shard>" where the
            run's compression remembers something (``taskmesh.checkpoints.tables``).
        metrics: "loss" and the like.
        restored_from: the version that a rollback made current again with this one.
        skipped: batches that the run leaves out.
        fingerprint: what the bits of the run's steps depend on beside the run itself (torch build, processor,
            threads); "" where they may be any.
        at_ms: when it was committed, by the master's clock; milliseconds since 1970, 0 where nobody noted it.
    """

    version: int
    parent: int
    step: int
    batch: int
    token: int
    kept: bool
    layout: str
    parts: Mapping[str, Part]
    metrics: Mapping[str, float] = field(default_factory=dict)
    restored_from: int | None = None
    skipped: tuple[int, ...] = ()
    at_ms: int = 0
    fingerprint: str = ""

    def keys(self, run: RunKeys) -> list[bytes]:
        """Every chunk that the version needs."""
        return [key for part in self.parts.values() for key in part.keys(run)]

    @property
    def size_bytes(self) -> int:
        """All its parts."""
        return sum(part.size_bytes for part in self.parts.values())

    @property
    def written_bytes(self) -> int:
        """Of them, those that were written for it and not for an earlier version."""
        return sum(part.own_bytes for part in self.parts.values() if part.version == self.version)


def digest_of(piece: bytes | memoryview) -> bytes:
    """The digest of a chunk that is kept."""
    return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()


def checksum_of(piece: bytes | memoryview) -> bytes:
    """The digest of a chunk that lasts for a step or so."""
    return xxhash.xxh3_128_digest(piece)


def is_whole(part: Part, value: memoryview) -> bool:
    """Whether memory of a part's size holds the part."""
    digest = digest_of if part.kept else checksum_of
    return tuple(map(digest, chunks.split(value))) == part.digests


def root_of(digests: Sequence[bytes]) -> bytes:
    """One digest over the digests of a part's chunks."""
    return digest_of(b"".join(digests))


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)
_keys_decoder = msgspec.msgpack.Decoder(list[bytes])


def encode(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def decode(data: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        CheckpointError: the bytes are not one.
    """
    try:
        manifest = _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"a manifest is damaged: {error}") from None
    for name, part in manifest.parts.items():
        at = 0
        for loan in part.loans:
            if loan.place < at or loan.count < 1 or loan.place + loan.count > len(part.digests):
                raise CheckpointError(
                    f"a manifest is damaged: the loans of {name!r} are not among its chunks"
                )
            at = loan.place + loan.count
    return manifest


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Chunk keys as a note of garbage holds them."""
    return _encoder.encode(list(keys))


def unpack_keys(data: bytes) -> list[bytes]:
    return _keys_decoder.decode(data)
