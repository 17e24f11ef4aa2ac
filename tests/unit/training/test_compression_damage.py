"""Whatever the bytes: gradients that are finite, or DecodeError; soon, and in memory in proportion to the values."""

from __future__ import annotations

import random
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from taskmesh.errors import DecodeError
from taskmesh.training import Compression
from taskmesh.training.buckets import Bucket
from tests.hostile import Damage
from tests.unit.training.compressions import COMPRESSIONS, Link, normal

BUCKET = Bucket(0, 300, ((12, 20), (60,)))
SEEDS = st.integers(0, 2**32)
LOSSY = [each for each in COMPRESSIONS if not each.is_plain]
thorough = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
each_one = pytest.mark.parametrize("compression", LOSSY, ids=lambda one: one.name)


def samples(compression: Compression) -> list[bytes]:
    link = Link(compression, BUCKET)
    return [link.pack(normal(BUCKET.size, step) * np.float32(10.0 ** (7 * step - 7))) for step in range(3)]


def refuses_or_reads(compression: Compression, data: bytes, bucket: Bucket = BUCKET) -> bool:
    """Whether it reads: then all values are there, and finite, and nothing beside them was touched."""
    around = np.full(bucket.size + 20, 7.5, np.float32)
    values = around[10:-10]
    values[:] = np.nan
    try:
        compression.decompress(data, values, bucket)
    except DecodeError:
        return False
    finally:
        assert (around[:10] == 7.5).all()
        assert (around[-10:] == 7.5).all()
    assert np.isfinite(values).all()
    return True


@pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda one: one.name)
@thorough
@given(seed=SEEDS)
def test_damaged_bytes(compression: Compression, seed: int) -> None:
    note(f"seed {seed}")
    damage = Damage(seed, samples(compression))
    for _ in range(5):
        data = damage.next()
        if not compression.is_plain:
            refuses_or_reads(compression, data)
        elif len(data) != 4 * BUCKET.size:
            assert not refuses_or_reads(compression, data)


@each_one
def test_every_cut_and_every_flipped_bit_of_real_bytes(compression: Compression) -> None:
    read = 0
    for sample in samples(compression):
        for place in range(len(sample)):
            assert not refuses_or_reads(compression, sample[:place])
            for bit in range(8):
                changed = bytearray(sample)
                changed[place] ^= 1 << bit
                read += refuses_or_reads(compression, bytes(changed))
    assert read, "most flips change a value, and no more"


@each_one
@thorough
@given(seed=SEEDS)
def test_noise_behind_a_real_head(compression: Compression, seed: int) -> None:
    """Each number of the head and of the counts behind it may be anything, and so may all that follows."""
    note(f"seed {seed}")
    draw = random.Random(seed)
    sample = samples(compression)[draw.randrange(3)]
    head = bytearray(sample[:16])
    if draw.random() < 0.7:
        head[1] = draw.choice((0, 1, 2, 3, 255, head[1]))
    if draw.random() < 0.3:
        head[2:4] = struct.pack("<h", draw.choice((-32_768, -113, -114, 0, 126, 127, 32_767)))
    if draw.random() < 0.7:
        head[12:16] = struct.pack("<I", draw.choice((0, 1, 2, 30, 299, 300, 301, 2**16, 2**31, 2**32 - 1)))
    body = draw.randbytes(draw.choice((0, 1, len(sample) - 16, draw.randrange(1500))))
    refuses_or_reads(compression, bytes(head) + draw.choice((body, sample[16:], bytes(len(sample) - 16))))


@each_one
def test_a_claim_of_more_than_there_is_takes_no_memory(compression: Compression) -> None:
    data = bytearray(samples(compression)[0])
    for count in (2**62, 2**64 - 1, 2**40):
        data[4:12] = struct.pack("<Q", count)
        data[12:16] = b"\xff" * 4
        tracemalloc.start()
        assert not refuses_or_reads(compression, bytes(data))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 1_000_000


@each_one
def test_bytes_in_memory_that_is_not_aligned(compression: Compression) -> None:
    for sample in samples(compression):
        shifted = memoryview(b"x" + sample)[1:]
        one, other = np.empty(BUCKET.size, np.float32), np.empty(BUCKET.size, np.float32)
        compression.decompress(sample, one, BUCKET)
        compression.decompress(shifted, other, BUCKET)
        assert one.tobytes() == other.tobytes()
