"""Top-K: which values are sent, how their places are written, and that the rest is sent later."""

from __future__ import annotations

import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training import TopK
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.indices import BITMAP, BLOCKS, DELTAS, pack_indices, unpack_indices
from taskmesh.training.compression.sparse import find_largest
from tests.unit.training.compressions import Link, bucket_of, final_loss, normal


def read_plainly(data: bytes) -> dict[int, float]:
    """A payload by its description, one number at a time: what is sent, by place."""
    _, coding, scale, size = struct.unpack_from("<BBhQ", data)
    kept = struct.unpack_from("<I", data, 12)[0]
    values = [half * 2.0**-scale for half in struct.unpack_from(f"<{kept}e", data, 16)]
    rest = data[16 + 2 * kept :]
    places: list[int] = []
    if coding == BITMAP:
        places = [at for at in range(size) if rest[at // 8] >> at % 8 & 1]
    elif coding == BLOCKS:
        blocks = -(-size // 65_536)
        low = list(struct.unpack_from(f"<{kept}H", rest, 4 * blocks))
        for block, count in enumerate(struct.unpack_from(f"<{blocks}I", rest)):
            places += [65_536 * block + low.pop(0) for _ in range(count)]
    else:
        at = -1
        for byte in rest:
            at += byte
            if byte != 255:
                at += 1
                places.append(at)
    assert len(places) == kept
    return dict(zip(places, values, strict=True))


@pytest.mark.parametrize(
    ("density", "coding"), [(0.5, BITMAP), (0.1, DELTAS), (0.01, DELTAS), (0.001, BLOCKS)]
)
def test_the_payload_is_as_described(density: float, coding: int) -> None:
    size = 150_000
    link = Link(TopK(density, feedback=False), Bucket(0, size))
    values = normal(size)
    data = link.pack(values)
    assert data[1] == coding
    found = read_plainly(data)
    assert len(found) == density * size
    assert sorted(found) == sorted(np.argsort(-np.abs(values), kind="stable")[: len(found)].tolist())
    for place, value in found.items():
        assert abs(value - values[place]) <= abs(values[place]) * 2**-11
    dense = np.zeros(size)
    dense[list(found)] = list(found.values())
    assert (link.unpack(data) == dense).all()


@settings(deadline=None)
@given(st.integers(1, 200_000), st.floats(0, 1), st.integers(0, 2**32), st.integers(0, 2))
def test_every_coding_gives_the_places_back(size: int, density: float, seed: int, spread: int) -> None:
    draw = np.random.default_rng(seed)
    width = (size, max(1, size // 50), size)[spread]  # all over it, or close together
    chosen = np.flatnonzero(draw.random(width) < density**2)
    coding, data = pack_indices(chosen, size)
    assert unpack_indices(coding, data, chosen.size, size).tolist() == chosen.tolist()
    assert len(data) <= min(-(-size // 8), 4 * -(-size // 65_536) + 2 * chosen.size)


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65_534, 65_535, 65_536])
def test_gaps_around_the_escape_and_the_ends_of_blocks(gap: int) -> None:
    size = 3 * gap + 500
    chosen = np.array([gap, 2 * gap + 1, 3 * gap + 2])
    link = Link(TopK(1e-9), Bucket(0, size))
    for places in (chosen, chosen[:1], np.arange(gap, gap + 400)):
        for coding in (BITMAP, BLOCKS, DELTAS):
            data = {
                BITMAP: lambda p: np.packbits(np.isin(np.arange(size), p), bitorder="little").tobytes(),
                BLOCKS: lambda p: (
                    np.bincount(p >> 16, minlength=-(-size // 65_536)).astype("<u4").tobytes()
                    + (p & 65_535).astype("<u2").tobytes()
                ),
                DELTAS: lambda p: b"".join(
                    b"\xff" * (int(g) // 255) + bytes([int(g) % 255]) for g in np.diff(p, prepend=-1) - 1
                ),
            }[coding](places)
            assert unpack_indices(coding, data, places.size, size).tolist() == places.tolist()
    assert link.send(np.eye(1, size, gap, dtype=np.float32)[0]).tolist().index(1.0) == gap


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -2.0, 1e-40]), max_size=60), st.integers(1, 70))
def test_of_equal_ones_the_first_are_sent_and_zeros_never(values: list[float], kept: int) -> None:
    order = sorted(range(len(values)), key=lambda at: (-abs(values[at]), at))
    wanted = sorted(at for at in order[:kept] if values[at])
    assert find_largest(np.array(values, np.float32), kept).tolist() == wanted


def test_at_least_one_value_is_sent() -> None:
    for size in (1, 5, 99):
        assert np.count_nonzero(Link(TopK(0.001), bucket_of(size)).send(normal(size))) == 1


def test_everything_arrives_in_the_end_rounding_included() -> None:
    link = Link(TopK(0.01), Bucket(0, 5000))
    given_, arrived = np.zeros(5000), np.zeros(5000)
    for step in range(200):
        gradient = normal(5000, step) + np.float32(0.3)
        given_ += gradient
        arrived += link.send(gradient)
    assert np.abs(given_ - arrived - link.memory["residual"]).max() < 1e-3, "nothing is lost on the way"
    for _ in range(400):  # nothing new: what is left goes out, then its rounding, and the rounding of that
        arrived += link.send(np.zeros(5000, np.float32))
    assert np.abs(link.memory["residual"]).max() < 1e-6 * np.abs(given_).max()
    assert np.abs(given_ - arrived).max() < 1e-3


def test_without_feedback_what_is_small_is_lost() -> None:
    values = np.full(1000, 0.1, np.float32)
    values[:10] = 1.0
    with_, without = Link(TopK(0.01), Bucket(0, 1000)), Link(TopK(0.01, feedback=False), Bucket(0, 1000))
    there, lost = np.zeros(1000), np.zeros(1000)
    for _ in range(300):
        there += with_.send(values)
        lost += without.send(values)
    assert not lost[10:].any()
    assert np.abs(lost[:10] / 300 - 1).max() < 1e-3
    assert 0.5 < there[10:].mean() / 30 <= 1
    assert there[10:].min() > 0


def test_the_residual_is_what_the_payload_lacks_to_the_bit() -> None:
    link = Link(TopK(0.1), Bucket(0, 1000))
    values = normal(1000)
    found = link.send(values)
    assert (link.memory["residual"] == values - found).all()
    assert link.memory["residual"][found != 0].any(), "the rounding of what was sent is kept too"


def test_training_converges_with_feedback_and_not_at_a_thousandth_without() -> None:
    """The negative control must fail, or the test would show nothing."""
    at_first, dense = final_loss(None, steps=1), final_loss(None)
    with_feedback = final_loss(TopK(0.01))
    without = final_loss(TopK(0.001, feedback=False))
    assert dense < 0.2 * at_first
    assert with_feedback < 1.5 * dense
    assert without > 3 * dense


@pytest.mark.parametrize("density", [0.0, -0.1, 1.1, float("nan")])
def test_a_density_that_cannot_be_is_refused(density: float) -> None:
    with pytest.raises(ConfigurationError, match="density"):
        TopK(density)


def payload(coding: int, scale: int, size: int, halves: list[float], indices: bytes) -> bytes:
    head = struct.pack("<BBhQI", 4, coding, scale, size, len(halves))
    return head + np.array(halves, "<f2").tobytes() + indices


@pytest.mark.parametrize(
    "data",
    [
        payload(3, 0, 10, [1.0], b"\x00"),
        payload(255, 0, 10, [1.0], b"\x00"),
        payload(DELTAS, 0, 10, [1.0], b"\x0a"),
        payload(DELTAS, 0, 10, [1.0, 1.0], b"\x00\x09"),
        payload(DELTAS, 0, 10, [1.0], b"\xff\x00"),
        payload(DELTAS, 0, 10, [1.0], b"\xff"),
        payload(DELTAS, 0, 10, [1.0], b""),
        payload(DELTAS, 0, 10, [1.0], b"\x00\x00"),
        payload(DELTAS, 0, 10, [], b"\x00"),
        payload(BLOCKS, 0, 10, [1.0], struct.pack("<IH", 1, 10)),
        payload(BLOCKS, 0, 10, [1.0], struct.pack("<IH", 2, 1)),
        payload(BLOCKS, 0, 10, [1.0, 1.0], struct.pack("<IHH", 2, 5, 5)),
        payload(BLOCKS, 0, 10, [1.0, 1.0], struct.pack("<IHH", 2, 5, 4)),
        payload(BLOCKS, 0, 10, [1.0], struct.pack("<IHH", 1, 5, 6)),
        payload(BLOCKS, 0, 10, [1.0], struct.pack("<IH", 2**32 - 1, 5)),
        payload(BITMAP, 0, 10, [1.0], b"\x01\x04"),
        payload(BITMAP, 0, 10, [1.0], b"\x00\x04"),
        payload(BITMAP, 0, 10, [1.0], b"\x01"),
        payload(BITMAP, 0, 10, [1.0], b"\x01\x00\x00"),
        payload(BITMAP, 0, 10, [1.0, 1.0], b"\x01\x00"),
        payload(DELTAS, 0, 10, [float("inf")], b"\x00"),
        payload(DELTAS, 0, 10, [float("nan")], b"\x00"),
        payload(DELTAS, 200, 10, [1.0], b"\x00"),
        payload(DELTAS, -200, 10, [1.0], b"\x00"),
        payload(DELTAS, 0, 10, [1.0] * 11, b"\x00" * 11),
        struct.pack("<BBhQI", 4, DELTAS, 0, 10, 2**32 - 1),
    ],
)
def test_what_no_shard_sends_is_refused(data: bytes) -> None:
    with pytest.raises(DecodeError):
        Link(TopK(), Bucket(0, 10)).unpack(data)
    good = payload(DELTAS, 0, 10, [1.0, 2.0], b"\x00\x08")
    assert Link(TopK(), Bucket(0, 10)).unpack(good).tolist() == [1.0] + [0.0] * 8 + [2.0]


def test_an_escape_that_nothing_follows_is_refused() -> None:
    link = Link(TopK(), Bucket(0, 600))
    assert link.unpack(payload(DELTAS, 0, 600, [1.0], b"\xff\x03"))[258] == 1.0
    for indices in (b"\x00\xff", b"\xff\x03\xff", b"\xff\xff"):
        with pytest.raises(DecodeError):
            link.unpack(payload(DELTAS, 0, 600, [1.0], indices))


def test_more_deltas_than_there_can_be_are_not_even_read() -> None:
    link = Link(TopK(), Bucket(0, 600))
    data = payload(DELTAS, 0, 600, [1.0], bytes(1_000_000))
    tracemalloc.start()
    with pytest.raises(DecodeError):
        link.unpack(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000
