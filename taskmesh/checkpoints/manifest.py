"""What a version is: where its chunks lie, and what they must hold."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import xxhash

from taskmesh.errors import CheckpointError
from taskmesh.keys import RunKeys

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class Part:
    """One value of a version ("parameters", "state"), as the chunks that hold it.

    The chunks are named by the version and token that wrote them, which are another's where a rollback made an
    older version's chunks current again.

    Attributes:
        kept: on the durable server; else on the one for values that can be formed again.
        first: index of its first chunk within the version that wrote it.
        digests: of each chunk, 16 bytes: blake2b where it is kept, else XXH3, which finds damage as well, ten times as
            fast, and only does not withstand an adversary.
    """

    kept: bool
    version: int
    token: int
    first: int
    size_bytes: int
    digests: tuple[bytes, ...]

    def keys(self, run: RunKeys) -> list[bytes]:
        """The chunks' keys, in order."""
        return [run.chunk(self.version, self.token, self.first + place) for place in range(len(self.digests))]

    @property
    def root(self) -> bytes:
        """One digest over all."""
        return root_of(self.digests)


@dataclass(frozen=True, slots=True)
class Manifest:
    """One version of a run.

    Attributes:
        version: rises with every commit of the run, rollbacks and replays included.
        parent: the version that it was formed from; 0 for the first.
        step: updates that its parameters have seen.
        batch: batches that were drawn from the sampler, skipped ones included.
        token: the fencing token of the master that wrote it.
        kept: a checkpoint, with all that a run needs to go on.
        layout: digest of the parameters' layout.
        parts: by name; "parameters" always, "state" where it is kept.
        metrics: "loss" and the like.
        restored_from: the version that a rollback made current again with this one.
        skipped: batches that the run leaves out.
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

    def keys(self, run: RunKeys) -> list[bytes]:
        """Every chunk that the version needs."""
        return [key for part in self.parts.values() for key in part.keys(run)]


def digest_of(piece: bytes | memoryview) -> bytes:
    """The digest of a chunk that is kept."""
    return hashlib.blake2b(piece, digest_size=DIGEST_BYTES).digest()


def checksum_of(piece: bytes | memoryview) -> bytes:
    """The digest of a chunk that lasts for a step or so."""
    return xxhash.xxh3_128_digest(piece)


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
        return _decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"a manifest is damaged: {error}") from None


def pack_keys(keys: Sequence[bytes]) -> bytes:
    """Chunk keys as a note of garbage holds them."""
    return _encoder.encode(list(keys))


def unpack_keys(data: bytes) -> list[bytes]:
    return _keys_decoder.decode(data)
