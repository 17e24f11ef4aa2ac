"""fp16 under a scale, and bfloat16."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training import Half
from taskmesh.training.buckets import Bucket
from tests.unit.training.compressions import Link, normal

FP16, BF16 = Half("fp16"), Half("bf16")
all_finite = st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True)
any_values = arrays_of.arrays(np.float32, st.integers(1, 300), elements=all_finite)


def send(compression: Half, values: np.ndarray) -> np.ndarray:
    return Link(compression, Bucket(0, values.size)).send(values)


def test_small_gradients_do_not_vanish_as_they_would_in_fp16_alone() -> None:
    values = normal(10_000) * np.float32(1e-9)
    assert not values.astype(np.float16).any()
    found = send(FP16, values)
    assert np.abs(found - values).max() <= np.abs(values).max() * 2.0**-11
    assert np.count_nonzero(found) == np.count_nonzero(values)


@given(any_values)
def test_fp16_keeps_eleven_bits_of_what_is_not_far_below_the_largest(values: np.ndarray) -> None:
    found = send(FP16, values).astype(np.float64)
    wanted = values.astype(np.float64)
    largest = np.abs(wanted).max()
    error = np.abs(found - wanted)
    # Below 2**-28 of the largest, fp16 has fixed steps; fp32 itself has them below 2**-126.
    assert (error <= np.maximum(np.abs(wanted) * 2.0**-11, max(largest * 2.0**-39, 2.0**-149))).all()


def test_the_scale_is_in_the_head_and_the_halves_follow() -> None:
    values = np.array([3.0, -0.75, 0.0, 2.0**-20], np.float32)
    data = Link(FP16, Bucket(0, 4)).pack(values)
    method, scale, _, count = struct.unpack_from("<BhBQ", data)
    assert (method, scale, count) == (2, 13, 4)  # 3 * 2**13 is the largest below 2**15
    assert (np.frombuffer(data, "<f2", offset=12).astype(np.float64) / 2.0**13).tolist() == values.tolist()


def test_the_largest_numbers_stay_finite() -> None:
    largest = np.finfo(np.float32).max
    for compression in (FP16, BF16):
        found = send(compression, np.array([largest, -largest], np.float32)).astype(np.float64)
        assert np.isfinite(found).all()
        assert np.abs(found / [largest, -largest] - 1).max() < 2**-7


@given(any_values)
def test_bf16_rounds_as_torch_does(values: np.ndarray) -> None:
    wanted = torch.from_numpy(values).to(torch.bfloat16).to(torch.float32).numpy()
    held = np.clip(wanted, -3.3895313892515355e38, 3.3895313892515355e38)
    assert send(BF16, values).tobytes() == held.astype(np.float32).tobytes()


def test_both_round_ties_to_even() -> None:
    for compression, bits in ((FP16, 11), (BF16, 8)):
        step = 2.0 ** (1 - bits)
        values = np.array([1 + step / 2, 1 + 3 * step / 2, -1 - step / 2, 1 + step * 0.501], np.float32)
        assert send(compression, values).tolist() == [1, 1 + 2 * step, -1, 1 + step]


@pytest.mark.parametrize("scale", [-114, 127, 32_767, -32_768])
def test_a_scale_that_is_none_is_refused(scale: int) -> None:
    data = bytearray(Link(FP16, Bucket(0, 3)).pack(normal(3)))
    data[1:3] = struct.pack("<h", scale)
    with pytest.raises(DecodeError, match="scale"):
        Link(FP16, Bucket(0, 3)).unpack(bytes(data))


@pytest.mark.parametrize("compression", [FP16, BF16], ids=["fp16", "bf16"])
def test_numbers_that_are_none_are_refused(compression: Half) -> None:
    for bits in (0x7C00, 0xFC00, 0x7E00, 0x7800) if compression is FP16 else (0x7F80, 0xFF80, 0x7FC0):
        data = bytearray(Link(compression, Bucket(0, 3)).pack(normal(3)))
        data[-2:] = struct.pack("<H", bits)
        with pytest.raises(DecodeError):
            Link(compression, Bucket(0, 3)).unpack(bytes(data))


def test_another_kind_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="fp16"):
        Half("fp8")  # type: ignore[arg-type]
