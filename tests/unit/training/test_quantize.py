"""int8 with seeded stochastic rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training import Compression, Int8, NoCompression
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.chance import uniform

INT8 = Int8()


def pack(compression: Compression, values: np.ndarray, key: int) -> bytes:
    return bytes(compression.compress(values, key, Bucket(0, values.size)))


def unpack(compression: Compression, data: bytes, count: int) -> np.ndarray:
    values = np.empty(count, np.float32)
    compression.decompress(data, values, Bucket(0, count))
    return values


def normal(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def test_small_values_survive_in_the_sum_where_the_nearest_step_would_lose_them() -> None:
    values = np.full(2048, 1e-3, np.float32)
    values[0] = 1.0
    total = np.zeros(2048, np.float64)
    for key in range(1000):
        total += unpack(INT8, pack(INT8, values, key), values.size)
    # A step is 1/127: the nearest to 1e-3 is 0, a thousand times. Each sum has expectation 1 and deviation 0.083.
    assert np.rint(values[1:] * 127).max() == 0
    assert abs(total[1:].mean() - 1.0) < 0.01
    assert total[1:].min() > 0.5
    assert abs(total[0] - 1000.0) < 0.01


@pytest.mark.parametrize("count", [2048, 2049, 9_610, 1_000_000])
@pytest.mark.parametrize("chunk", [1024, 2048, 4096])
def test_at_least_74_5_percent_fewer_bytes_head_included(count: int, chunk: int) -> None:
    data = pack(Int8(chunk), normal(count), 1)
    assert 1 - len(data) / (4 * count) >= 0.745


def test_the_same_key_gives_the_same_bytes_and_another_gives_others() -> None:
    values = normal(5000)
    assert pack(INT8, values, 7) == pack(INT8, values, 7)
    assert pack(INT8, values, 7) != pack(INT8, values, 8)


def test_chance_is_spread_evenly_and_never_0_or_1() -> None:
    draws = uniform(7, 1_000_000)
    assert (draws * 65_536 % 1 == 0.5).all()
    assert 0 < draws.min() < 1e-4
    assert 1 - 1e-4 < draws.max() < 1
    assert abs(draws.mean() - 0.5) < 0.002
    assert abs(np.corrcoef(draws[1:], draws[:-1])[0, 1]) < 0.005


def test_the_bytes_are_pinned() -> None:
    """They must never change: a run that is resumed by a later release would not come out the same."""
    values = np.linspace(-1, 1, 70, dtype=np.float32)
    data = pack(Int8(chunk=64), values, 42)
    assert data[:12].hex() == "014000004600000000000000"
    assert np.frombuffer(data, np.int8, offset=20).tolist()[:8] == [
        -127,
        -124,
        -120,
        -116,
        -112,
        -109,
        -105,
        -102,
    ]


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 2047, 2048, 2049])
def test_any_length_comes_back_within_one_step(count: int) -> None:
    values = normal(count)
    found = unpack(INT8, pack(INT8, values, 3), count)
    assert found.shape == (count,)
    assert found.dtype == np.float32
    if count:
        assert np.abs(found - values).max() <= np.abs(values).max() / 127 * 1.001


def test_zeros_stay_zeros_and_constants_stay_constant() -> None:
    assert not unpack(INT8, pack(INT8, np.zeros(3000, np.float32), 1), 3000).any()
    constant = np.full(3000, -2.5, np.float32)
    assert np.abs(unpack(INT8, pack(INT8, constant, 1), 3000) + 2.5).max() <= 2.5 / 127 * 1.001


def test_a_chunk_of_values_too_small_to_scale_becomes_zeros() -> None:
    tiny = np.full(100, 1e-40, np.float32)
    assert not unpack(INT8, pack(INT8, tiny, 1), 100).any()


def test_one_large_value_costs_only_its_own_chunk() -> None:
    values = np.full(4096, 0.01, np.float32)
    values[0] = 1e6
    found = unpack(INT8, pack(INT8, values, 1), 4096)
    assert np.abs(found[2048:] - 0.01).max() < 1e-4


def test_the_largest_numbers_do_not_overflow() -> None:
    largest = np.full(10, np.finfo(np.float32).max)
    found = unpack(INT8, pack(INT8, largest, 1), 10)
    assert np.isfinite(found).all()
    assert (found >= largest / 128 * 126).all()
    data = bytearray(pack(INT8, largest, 1))
    data[16:] = b"\x80" * 10  # -128 is not sent, and would be finite all the same
    assert np.isfinite(unpack(INT8, bytes(data), 10)).all()


@pytest.mark.parametrize("scale", [-1.0, float("nan"), float("inf"), float(np.finfo(np.float32).max) / 127])
def test_a_scale_that_is_none_is_refused(scale: float) -> None:
    data = bytearray(pack(INT8, normal(10), 1))
    data[12:16] = np.float32(scale).tobytes()
    with pytest.raises(DecodeError, match="scale"):
        unpack(INT8, bytes(data), 10)


@given(
    arrays_of.arrays(
        np.float32,
        st.integers(0, 300),
        elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=True),
    ),
    st.integers(0, 2**128 - 1),
)
def test_the_error_is_at_most_one_step(values: np.ndarray, key: int) -> None:
    compression = Int8(chunk=64)
    found = unpack(compression, pack(compression, values, key), values.size)
    for at in range(0, values.size, 64):
        chunk, back = values[at : at + 64].astype(np.float64), found[at : at + 64].astype(np.float64)
        largest = np.abs(chunk).max()
        bound = largest / 127 * 1.001 if largest > 1.5e-36 else largest  # below that a chunk becomes zeros
        assert np.abs(chunk - back).max() <= bound


@pytest.mark.parametrize("compression", [Int8(), NoCompression()])
def test_damage_and_disagreement_are_found(compression: Int8 | NoCompression) -> None:
    data = pack(compression, normal(100), 1)
    for broken in (data[:-1], data + b"x", data[:11], b""):
        with pytest.raises(DecodeError):
            unpack(compression, broken, 100)
    with pytest.raises(DecodeError, match=r"99|100"):
        unpack(compression, data, 99)
    other = NoCompression() if isinstance(compression, Int8) else Int8()
    with pytest.raises(DecodeError):
        unpack(other, data, 100)
    with pytest.raises(DecodeError, match="chunks"):
        unpack(Int8(chunk=512), pack(Int8(), normal(100), 1), 100)


def test_no_compression_is_exact() -> None:
    values = normal(77)
    assert np.array_equal(unpack(NoCompression(), pack(NoCompression(), values, 0), 77), values)


def test_a_chunk_length_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        Int8(chunk=63)
