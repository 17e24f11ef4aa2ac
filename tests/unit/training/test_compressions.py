"""What holds for every compression of gradients."""

from __future__ import annotations

import hashlib
import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from taskmesh.errors import DecodeError
from taskmesh.training import DGC, Compression, Half, Int8, LowRank, NoCompression, TopK
from taskmesh.training.buckets import BUCKET_VALUES, Bucket
from tests.unit.training.compressions import COMPRESSIONS, STATEFUL, Link, bucket_of, exact, normal

each_one = pytest.mark.parametrize("compression", COMPRESSIONS, ids=lambda one: one.name)
MILLION = 1_000_000
# Of each method: three steps of 60,700 values, and the memory after them.
PINNED = {
    "none": "8edfbf960f46d711",
    "fp16": "a3b4f160ff2e86d1",
    "bf16": "87f9a19683b5ba62",
    "int8/2048": "5fd0c158d9077e62",
    "topk/0.5": "aced23e48293112c",
    "topk/0.1": "0e35a0a3baf28867",
    "topk/0.01": "2f9555eade055c05",
    "topk/0.001": "a4670afd1ef6d642",
    "topk/0.1/no feedback": "4847952ad8bf7d4b",
    "dgc/0.01/momentum 0.9/clip 100.0/warm-up 10": "6857edd7afec91aa",
    "lowrank/1": "085729171a15aa51",
    "lowrank/4": "d90d891ddfacf79b",
}
DIGEST = """
from tests.unit.training.test_compressions import COMPRESSIONS, digest
print(*(digest(each) for each in COMPRESSIONS))
"""


def digest(compression: Compression) -> str:
    """Of what three steps send, and of what is remembered after them."""
    link = Link(compression, Bucket(0, 60_700, ((300, 200), (200,), (2, 5, 5, 10))))
    seen = hashlib.blake2b(digest_size=8)
    for step in range(3):
        seen.update(link.pack(exact(link.bucket.size, step)))
    for name in sorted(link.memory):
        seen.update(link.memory[name].tobytes())
    return seen.hexdigest()


@each_one
def test_the_bytes_are_pinned(compression: Compression) -> None:
    """They must never change: a run that is resumed by a later release would not come out the same."""
    assert digest(compression) == PINNED[compression.name]


@pytest.mark.skipif(sys.platform == "darwin", reason="the variables are those of OpenBLAS")
def test_the_bytes_are_those_of_any_processor_and_any_blas() -> None:
    """Without vector instructions, with the kernels of another processor, and with another number of threads."""
    core = importlib.import_module("numpy._core" if hasattr(np, "_core") else "numpy.core")
    features = " ".join(core._multiarray_umath.__cpu_dispatch__)
    plain = {"NPY_DISABLE_CPU_FEATURES": features, "OPENBLAS_CORETYPE": "Prescott"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DIGEST],
        cwd=Path(__file__).parents[3],
        env={**os.environ, **plain, "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert done.stdout.split() == [PINNED[each.name] for each in COMPRESSIONS]


def sent_share(compression: Compression, steps: int = 1) -> float:
    """Bytes of a million values against fp32's, all heads included, in the buckets of a parameter of that size."""
    links = [Link(compression, Bucket(at, at + MILLION // 4)) for at in range(0, MILLION, MILLION // 4)]
    for step in range(steps):
        for place, link in enumerate(links):
            link.pack(normal(link.bucket.size, 4 * step + place))
    return sum(link.sent_bytes for link in links) / (4 * MILLION * steps)


@pytest.mark.parametrize(
    ("compression", "least"),
    [
        (Half("fp16"), 0.4999),
        (Half("bf16"), 0.4999),
        (Int8(), 0.745),
        (TopK(0.1), 0.90),
        (TopK(0.01), 0.992),
        (TopK(0.001), 0.9989),
        (TopK(0.01, feedback=False), 0.992),
        (DGC(0.001), 0.9989),
    ],
    ids=lambda one: getattr(one, "name", str(one)),
)
def test_so_many_fewer_bytes_for_a_million_values(compression: Compression, least: float) -> None:
    assert 1 - sent_share(compression, steps=3) >= least


def test_so_many_fewer_bytes_at_low_rank() -> None:
    link = Link(LowRank(4), Bucket(0, MILLION, ((1000, 1000),)))
    link.send(normal(MILLION))
    assert 1 - link.sent_bytes / (4 * MILLION) >= 0.995


@each_one
@pytest.mark.parametrize("size", [0, 1, 2, 3, 7, 8, 9, 255, 256, 257, 2048, 9_610])
def test_any_length_comes_back(compression: Compression, size: int) -> None:
    link = Link(compression, bucket_of(size))
    for step in range(3):
        found = link.send(normal(size, step))
        assert found.shape == (size,)
        assert np.isfinite(found).all()
        assert not size or found.any()


@each_one
@pytest.mark.parametrize("size", [1, 100, 5000])
def test_zeros_stay_zeros(compression: Compression, size: int) -> None:
    link = Link(compression, bucket_of(size))
    for _ in range(3):
        assert not link.send(np.zeros(size, np.float32)).any()
        assert np.isfinite(np.concatenate([*link.memory.values(), [0]])).all()
    assert link.send(np.ones(size, np.float32)).any(), "and what comes after them is sent"


@each_one
@pytest.mark.parametrize("value", [-2.5, 1e-30, -3e-39, 1e-45, 3e38])
def test_constants(compression: Compression, value: float) -> None:
    """Never more than there was, never the other sign, and never anything that is no number."""
    link = Link(compression, bucket_of(3000))
    total = np.zeros(3000)
    for step in range(1, 6):
        total += link.send(np.full(3000, value, np.float32))
        share = total / (np.float64(np.float32(value)) * step)
        assert np.isfinite(share).all()
        assert share.min() >= -0.01
        most = sum(0.9**k for k in range(step)) if isinstance(compression, DGC) else 1.01
        assert share.max() <= most * 1.001


@each_one
def test_huge_and_tiny_values_together(compression: Compression) -> None:
    largest = np.finfo(np.float32).max
    values = normal(4096) * np.float32(1e-20)
    values[::100], values[1::100] = largest, -largest
    values[2::100], values[3::100] = 1e-45, 0
    link = Link(compression, bucket_of(4096))
    for _ in range(4):
        assert np.isfinite(link.send(values)).all()
        for name, remembered in link.memory.items():
            assert np.isfinite(remembered).all(), name


@each_one
def test_one_element(compression: Compression) -> None:
    link = Link(compression, Bucket(5, 6, ((1,),)))
    assert abs(link.send(np.float32([0.3]))[0] - 0.3) <= 0.3 / 127


@each_one
def test_the_same_in_gives_the_same_out(compression: Compression) -> None:
    one, other = (Link(compression, bucket_of(5000)) for _ in range(2))
    for step in range(3):
        assert one.pack(normal(5000, step)) == other.pack(normal(5000, step))
    for name in one.memory:
        assert one.memory[name].tobytes() == other.memory[name].tobytes()


@each_one
def test_memory_is_flat_fp32_and_can_be_carried_elsewhere(compression: Compression) -> None:
    link = Link(compression, bucket_of(5000))
    for step in range(2):
        link.send(normal(5000, step))
    moved = Link(compression, link.bucket)
    moved.key = link.key
    for name, values in link.memory.items():
        assert values.dtype == np.float32
        assert values.ndim == 1
        moved.memory[name][:] = np.frombuffer(values.tobytes(), np.float32)
    assert moved.memory.keys() == link.memory.keys()
    assert moved.pack(normal(5000, 9)) == link.pack(normal(5000, 9))


@pytest.mark.parametrize("compression", STATEFUL, ids=lambda one: one.name)
def test_a_memory_that_is_not_the_buckets_is_refused(compression: Compression) -> None:
    values, bucket = normal(100), bucket_of(100)
    others = compression.memory(bucket_of(99))
    wide = {name: each.astype(np.float64) for name, each in compression.memory(bucket).items()}
    for memory in (None, {}, others, wide):
        with pytest.raises(ValueError, match="memory"):
            compression.compress(values, 1, bucket, memory)


def test_which_of_them_remember() -> None:
    stateless = {each.name for each in COMPRESSIONS} - {each.name for each in STATEFUL}
    assert stateless == {"none", "fp16", "bf16", "int8/2048", "topk/0.1/no feedback"}
    assert [each.name for each in COMPRESSIONS if each.takes_whole_parameters] == ["lowrank/1", "lowrank/4"]
    assert [each.name for each in COMPRESSIONS if each.is_plain] == ["none"]
    assert len({each.name for each in COMPRESSIONS}) == len(COMPRESSIONS)


@each_one
def test_another_method_another_length_and_other_settings_are_found(compression: Compression) -> None:
    link = Link(compression, bucket_of(5000))
    data = link.pack(normal(5000))
    for broken in (data[:-1], data + b"x", data[:11], data[:12], data[:15], b""):
        with pytest.raises(DecodeError):
            link.unpack(broken)
    for size in (4999, 5001):
        with pytest.raises(DecodeError):
            Link(compression, bucket_of(size)).unpack(data)
    for other in (NoCompression(), Half("fp16"), Half("bf16"), Int8(64), TopK(), DGC(), LowRank(3)):
        if type(other) is not type(compression) or isinstance(other, LowRank | Int8):
            with pytest.raises(DecodeError):
                Link(other, bucket_of(5000)).unpack(data)


any_values = arrays_of.arrays(
    np.float32,
    st.integers(0, 400),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False, allow_subnormal=True),
)


@each_one
@settings(deadline=None)
@given(any_values, any_values)
def test_whatever_is_finite_comes_out_finite(
    compression: Compression, first: np.ndarray, second: np.ndarray
) -> None:
    size = min(first.size, second.size)
    link = Link(compression, bucket_of(size))
    for values in (first[:size], second[:size], first[:size]):
        assert np.isfinite(link.send(values.copy())).all()
        for remembered in link.memory.values():
            assert np.isfinite(remembered).all()


@each_one
@pytest.mark.parametrize("size", [BUCKET_VALUES])
def test_a_full_bucket_survives_many_steps(compression: Compression, size: int) -> None:
    link = Link(compression, Bucket(0, size, ((512, 512),)))
    for step in range(3):
        found = link.send(normal(size, step))
    assert np.isfinite(found).all()
