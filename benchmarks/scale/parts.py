"""What the parts of a step cost, each alone: a value's way to the server and back, and what is done to its bytes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import redis
import uvloop

from benchmarks.training.plan import COMPRESSIONS
from benchmarks.training.servers import Servers, servers
from taskmesh import Mesh, MeshSettings
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import checksum_of
from taskmesh.training.buckets import BUCKET_VALUES, Bucket
from taskmesh.training.compression import Compression
from taskmesh.training.compression.base import Memory
from taskmesh.training.memory import copy, fresh
from taskmesh.training.step.aggregate import TreeSum

READ_BYTES = chunks.TELL_OF * chunks.CHUNK_BYTES
METHODS = ("none", "int8", "topk_1%")


class Way(msgspec.Struct, frozen=True):
    """One end's processor time for what passes it: so much a byte, and so much for each value of a chunk."""

    s_per_byte: float
    s_per_value: float

    def seconds(self, size_bytes: float) -> float:
        return size_bytes * self.s_per_byte + size_bytes / chunks.CHUNK_BYTES * self.s_per_value


class Parts(msgspec.Struct, frozen=True, kw_only=True):
    """Processor seconds of one core.

    Attributes:
        send, receive: of a worker or master, by the bytes that are moved.
        take_in, give_out: of the server, likewise.
        pack: of a worker by the gradient's bytes as fp32, by compression: look at it, compress it, sum its bytes up.
        unpack: of whoever reduces, likewise: check the bytes, decode, look at the values.
        add: by bytes of fp32.
        share: compressed by fp32 bytes.
    """

    send: Way
    receive: Way
    take_in: Way
    give_out: Way
    add: float
    pack: dict[str, float]
    unpack: dict[str, float]
    share: dict[str, float]
    cores: int


class _Moved(NamedTuple):
    """Processor seconds of both ends for one direction."""

    client: float
    server: float


class _Ends:
    """The processor time of this process and of the server's."""

    def __init__(self, url: str) -> None:
        self._server = redis.Redis.from_url(url)

    def read(self) -> _Moved:
        found: dict[str, Any] = self._server.info("cpu")
        return _Moved(time.process_time(), found["used_cpu_sys"] + found["used_cpu_user"])

    def close(self) -> None:
        self._server.close()


async def _spent(ends: _Ends, rounds: int, move: Callable[[], Awaitable[None]]) -> _Moved:
    await move()  # warms up
    before = ends.read()
    for _ in range(rounds):
        await move()
    after = ends.read()
    return _Moved(*((late - early) / rounds for early, late in zip(before, after, strict=True)))


def _place_of(here: Sequence[memoryview], place: int, _: int) -> memoryview:
    return here[place]


def _ignore(place: int) -> None:
    """A value is there."""


async def _move(mesh: Mesh, ends: _Ends, value_bytes: int, count: int, rounds: int) -> tuple[_Moved, _Moved]:
    """Write so many values, and read them: processor seconds of each."""
    source = memoryview(bytearray(b"\x5a" * value_bytes * count))
    target = memoryview(bytearray(len(source)))
    pieces = [source[at : at + value_bytes] for at in range(0, len(source), value_bytes)]
    into = [target[at : at + value_bytes] for at in range(0, len(target), value_bytes)]
    keys = [b"{scale:%d}" % place for place in range(count)]
    bulk, at_once = mesh.client.bulk, max(1, READ_BYTES // value_bytes)

    async def put() -> None:
        await chunks.put(bulk, keys, pieces)

    async def get() -> None:
        for at in range(0, count, at_once):  # as a master is told of them
            some, here = keys[at : at + at_once], into[at : at + at_once]
            await chunks.get(bulk, some, functools.partial(_place_of, here), _ignore, READ_BYTES)

    return await _spent(ends, rounds, put), await _spent(ends, rounds, get)


async def _ways(urls: Servers, size_bytes: int, rounds: int) -> dict[str, Way]:
    """From large values and small ones: what a byte costs, and what a value."""
    large, small = chunks.CHUNK_BYTES, chunks.CHUNK_BYTES // 8
    count = max(1, size_bytes // large)
    ends = _Ends(urls.bulk)
    settings = MeshSettings(url=urls.durable, bulk_url=urls.bulk)
    try:
        async with Mesh("scale", settings=settings) as mesh:
            of_large = await _move(mesh, ends, large, count, rounds)
            of_small = await _move(mesh, ends, small, 8 * count, rounds)
    finally:
        ends.close()
    names = (("send", "take_in"), ("receive", "give_out"))
    return {
        name: _way(big, little, large * count, count, 8 * count)
        for both, bigs, littles in zip(names, of_large, of_small, strict=True)
        for name, big, little in zip(both, bigs, littles, strict=True)
    }


def _way(of_large: float, of_small: float, size_bytes: int, values: int, more_values: int) -> Way:
    """Two equations: the same bytes in few values and in many."""
    per_value = max(0.0, (of_small - of_large) / (more_values - values))
    return Way(max(0.0, of_large - values * per_value) / size_bytes, per_value)


def _best(rounds: int, work: Callable[[], object]) -> float:
    """The least seconds of several tries: whatever else the machine does only adds to it."""
    work()
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        found.append(time.perf_counter() - began)
    return min(found)


def _gradient(values: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(values, np.float32)


class _Costs(NamedTuple):
    """Of a gradient, by its bytes as fp32."""

    pack: float
    unpack: float
    share: float


def _worker_and_reducer(compression: Compression, size_bytes: int, rounds: int) -> _Costs:
    """Both sides, over a gradient that no cache holds."""
    values = _gradient(size_bytes // 4)
    decoded = (
        values if compression.is_plain else np.empty_like(values)
    )  # plain values arrive where they belong
    cuts = range(0, values.size, BUCKET_VALUES)
    buckets = [Bucket(at, min(at + BUCKET_VALUES, values.size)) for at in cuts]
    state = fresh(compression, buckets)
    kept: dict[int, Memory] = {}
    pieces: dict[int, memoryview] = {}

    def pack() -> None:
        for place, bucket in enumerate(buckets):
            given = values[bucket.start : bucket.stop]
            assert np.isfinite(given).all()
            kept[place] = copy(state[place])
            compressed = compression.compress(given, place, bucket, kept[place] or None)
            pieces[place] = memoryview(compressed).cast("B")
            checksum_of(pieces[place])

    def unpack() -> None:
        for place, bucket in enumerate(buckets):
            into = decoded[bucket.start : bucket.stop]
            checksum_of(pieces[place])
            compression.decompress(pieces[place], into, bucket)
            assert np.isfinite(into).all()

    packing, unpacking = _best(rounds, pack), _best(rounds, unpack)
    sent = sum(piece.nbytes for piece in pieces.values())
    return _Costs(packing / values.nbytes, unpacking / values.nbytes, sent / values.nbytes)


def _add_per_byte(size_bytes: int, rounds: int) -> float:
    """Of one addition of a gradient to another."""
    one, other = _gradient(size_bytes // 4), _gradient(size_bytes // 4)

    def add() -> None:
        tree = TreeSum(2)
        tree.add(0, one)
        tree.add(1, other)

    return _best(rounds, add) / one.nbytes


def measure_parts(size_bytes: int, rounds: int) -> Parts:
    """Each part alone, over values of so many bytes."""
    with servers() as both:
        ways = uvloop.run(_ways(both, size_bytes, rounds))
    found = {name: _worker_and_reducer(COMPRESSIONS[name](), size_bytes, rounds) for name in METHODS}
    return Parts(
        **ways,
        add=_add_per_byte(size_bytes, rounds),
        pack={name: each.pack for name, each in found.items()},
        unpack={name: each.unpack for name, each in found.items()},
        share={name: each.share for name, each in found.items()},
        cores=os.cpu_count() or 1,
    )
