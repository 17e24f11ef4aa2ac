"""Low rank: two thin factors for a matrix, and the rest remembered."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from taskmesh.errors import ConfigurationError, DecodeError
from taskmesh.training import LowRank
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression import factors
from taskmesh.training.compression.factors import Factors, expand, factor
from taskmesh.training.compression.sums import fold, orthonormalise, sum_in_order
from tests.unit.training.compressions import Link, final_loss, normal

MIXED = Bucket(100, 100 + 60 * 40 + 40 + 9 + 8 * 3 * 5 * 5, ((60, 40), (40,), (3, 3), (8, 3, 5, 5)))


def of_rank(rows: int, columns: int, rank: int, seed: int = 0) -> np.ndarray:
    return normal(rows * rank, seed).reshape(rows, rank) @ normal(rank * columns, seed + 1).reshape(
        rank, columns
    )


def test_a_matrix_of_that_rank_arrives_at_once() -> None:
    matrix = of_rank(60, 40, 3)
    for rank, most in ((3, 2e-4), (4, 2e-4), (2, 1.0)):
        link = Link(LowRank(rank), Bucket(0, 2400, ((60, 40),)))
        error = np.abs(link.send(matrix.reshape(-1)) - matrix.reshape(-1)).max() / np.abs(matrix).max()
        assert error < most
        assert rank > 2 or error > 0.02


def test_the_payload_is_as_described() -> None:
    link = Link(LowRank(2), MIXED)
    values = normal(MIXED.size)
    data = link.pack(values)
    assert struct.unpack_from("<BHxQ", data) == (6, 2, MIXED.size)
    plain = np.frombuffer(data, "<f4", 49, 12)
    assert plain.tolist() == values[2400:2449].tolist(), "a vector and a small matrix travel as they are"
    scales = struct.unpack_from("<4h", data, 12 + 4 * 49)
    rest = np.frombuffer(data, "<i2", offset=12 + 4 * 49 + 8).astype(object)
    assert rest.size == 2 * (60 + 40) + 2 * (8 + 75)
    found = link.unpack(data)
    assert found[2400:2449].tolist() == plain.tolist()
    for (rows, columns, at), own in zip(((60, 40, 0), (8, 75, 2449)), (scales[:2], scales[2:]), strict=True):
        left, rest = rest[: 2 * rows].reshape(2, rows), rest[2 * rows :]
        right, rest = rest[: 2 * columns].reshape(2, columns), rest[2 * columns :]
        wanted = sum(2.0 ** own[term] * np.outer(left[term], right[term]) for term in range(2))
        assert np.allclose(
            found[at : at + rows * columns], wanted.astype(float).reshape(-1), rtol=1e-5, atol=1e-6
        )


def test_nothing_is_lost_on_the_way() -> None:
    link = Link(LowRank(2), MIXED)
    given, arrived = np.zeros(MIXED.size), np.zeros(MIXED.size)
    for step in range(60):
        gradient = normal(MIXED.size, step) + np.float32(0.5)
        given += gradient
        arrived += link.send(gradient)
        assert np.abs(given - arrived - link.memory["error"]).max() < 1e-3
    for _ in range(100):  # nothing new: what is left goes out
        arrived += link.send(np.zeros(MIXED.size, np.float32))
    assert np.abs(given - arrived).max() < 1e-3 * np.abs(given).max()


def test_steps_from_the_directions_before_come_to_the_best_product_there_is() -> None:
    matrix = (of_rank(80, 50, 3) * 3 + normal(4000, 9).reshape(80, 50)).astype(np.float32)
    values = np.linalg.svd(matrix, compute_uv=False)
    best = float(np.sqrt((values[3:] ** 2).sum()))
    directions, errors = normal(150, 5).reshape(3, 50) / 8, []
    for _ in range(6):
        found = factor(matrix, directions)
        out = np.empty_like(matrix)
        expand(found, out)
        errors.append(float(np.linalg.norm(matrix - out)) / best)
        directions = (found.right * 2.0**-15).astype(np.float32)
    assert errors[0] > 1.1
    assert errors[-1] < 1.001


def test_a_direction_that_is_used_up_is_drawn_anew() -> None:
    """Zeros, and then a matrix of rank 1, leave nothing to begin from; what comes after is sent all the same."""
    bucket = Bucket(0, 2400, ((60, 40),))
    link = Link(LowRank(4), bucket)
    for values in (np.zeros((60, 40), np.float32), of_rank(60, 40, 1)):
        for _ in range(3):
            link.send(values.reshape(-1))
            assert link.memory["directions"].reshape(4, 40).any(axis=1).all()
    link.memory["error"][:] = 0
    matrix = of_rank(60, 40, 4, seed=7).reshape(-1)
    assert np.abs(link.send(matrix) - matrix).max() < 1e-2 * np.abs(matrix).max()


@pytest.mark.parametrize("factor_by", [1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e18])
def test_any_magnitude(factor_by: float) -> None:
    matrix = (of_rank(60, 40, 2) * factor_by).astype(np.float32)
    found = Link(LowRank(2), Bucket(0, 2400, ((60, 40),))).send(matrix.reshape(-1))
    assert np.abs(found / np.abs(matrix).max() - matrix.reshape(-1) / np.abs(matrix).max()).max() < 2e-3


def test_no_sum_is_rounded_so_that_any_order_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is to be made orthonormal is a sum of whole numbers that fp64 holds; blocks of any size give the same."""
    sums: list[np.ndarray] = []
    monkeypatch.setattr(
        factors, "orthonormalise", lambda left: (sums.append(left.copy()), orthonormalise(left))
    )
    for rows, columns in ((60, 40), (3, 70_000), (70_000, 3)):
        matrix = (normal(rows * columns) * np.exp(normal(rows * columns, 1) * 3)).reshape(rows, columns)
        directions = np.clip(normal(2 * columns, 2).reshape(2, columns) / 8, -1, 1)
        found = factor(matrix, directions)
        with monkeypatch.context() as patch:
            patch.setattr(factors, "_BLOCK_PRODUCTS", 1400)
            patch.setattr(factors, "_BLOCK_VALUES", 500)
            again = factor(matrix, directions)
            one, other = np.empty_like(matrix), np.empty_like(matrix)
            expand(found, one)
        expand(again, other)
        assert (sums[-1] == sums[-2]).all()
        assert (sums[-1] == np.rint(sums[-1])).all()
        assert 2**30 < np.abs(sums[-1]).max() <= 2**53
        assert all((a == b).all() for a, b in zip(found, again, strict=True))
        assert one.tobytes() == other.tobytes()
        assert all(2**14 <= np.abs(side.astype(int)).max() < 2**15 for side in found[:2])


def test_the_largest_sum_there_can_be_is_not_rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sums: list[np.ndarray] = []
    monkeypatch.setattr(
        factors, "orthonormalise", lambda left: (sums.append(left.copy()), orthonormalise(left))
    )
    below_one = np.float32(1 - 2**-24)
    for size in (2**13, 2**13 + 1):
        factor(np.full((1, size), below_one), np.full((1, size), below_one))
        assert 2**50 < sums[-1].max() <= 2**53


def test_columns_become_orthonormal_and_dependent_ones_zero() -> None:
    columns = normal(400).reshape(100, 4).astype(np.float64)
    columns[:, 2] = columns[:, 0] * 2 - columns[:, 1]
    orthonormalise(columns)
    wanted = np.diag([1.0, 1.0, 0.0, 1.0])
    assert np.abs(columns.T @ columns - wanted).max() < 1e-12
    assert not columns[:, 2].any()


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 1000, 1001])
def test_sums_in_order(size: int) -> None:
    values = normal(size).astype(np.float64)
    assert abs(sum_in_order(values) - values.sum()) < 1e-9
    rows = np.stack([values, 2 * values], axis=1)
    before = rows.copy()
    assert fold(rows).tolist() == [sum_in_order(values), sum_in_order(2 * values)]
    assert (rows == before).all()


def test_training_converges() -> None:
    dense = final_loss(None)
    assert final_loss(LowRank(1)) < 1.1 * dense


def test_what_is_compressed_and_what_is_not() -> None:
    for shape, size_bytes in (
        ((512, 512), 2 * 4 * 1024),
        ((8, 8), 2 * 4 * 16),
        ((7, 9), 4 * 63),  # its factors would have 128 bytes, more than half of its own
        ((1, 4096), 4 * 4096),
        ((4096,), 4 * 4096),
        ((), 4),
        ((64, 32, 3, 3), 2 * 4 * (64 + 288)),
    ):
        bucket = Bucket(0, int(np.prod(shape)), (shape,))
        data = Link(LowRank(4), bucket).pack(normal(bucket.size))
        scales = 8 if size_bytes < 4 * bucket.size else 0
        assert len(data) == 12 + size_bytes + scales, shape


def test_a_part_of_a_parameter_is_no_matrix() -> None:
    assert len(Link(LowRank(4), Bucket(0, 262_144)).pack(normal(262_144))) == 12 + 4 * 262_144


def test_a_bucket_that_is_not_what_its_shapes_say_is_refused() -> None:
    with pytest.raises(ValueError, match="a bucket of 10 values"):
        LowRank(4).memory(Bucket(0, 10, ((3, 3),)))


@pytest.mark.parametrize("rank", [0, -1, 257])
def test_a_rank_that_cannot_be_is_refused(rank: int) -> None:
    with pytest.raises(ConfigurationError, match="rank"):
        LowRank(rank)


def test_what_no_shard_sends_is_refused() -> None:
    link = Link(LowRank(2), MIXED)
    data = bytearray(link.pack(normal(MIXED.size)))
    for at, bits in ((12, b"\x00\x00\x80\x7f"), (12 + 4 * 49, b"\x41\x00"), (1, b"\x03\x00")):
        broken = data[:at] + bits + data[at + len(bits) :]
        with pytest.raises(DecodeError):
            link.unpack(bytes(broken))


def test_the_largest_factors_there_are_stay_finite() -> None:
    most = np.full((256, 600), -(2**15), np.int16)
    out = np.empty((600, 600), np.float32)
    expand(Factors(most, most, np.full(256, 64, np.int32)), out)
    assert np.isfinite(out).all()
