"""A step's gradient reduced by workers, range by range: the bits are those of the master's own reduce."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import redis
from torch import nn

from taskmesh import Mesh, TrainingError
from taskmesh.events import RolledBack, ShardRefused
from taskmesh.tasks import Call, Next
from taskmesh.training import (
    Compression,
    Every,
    Finished,
    Int8,
    LowRank,
    Median,
    NoCompression,
    TopK,
)
from taskmesh.training.master import reduction
from taskmesh.training.ranges import ReduceOrder, ReduceResult
from taskmesh.worker.runtime import Worker
from tests.conftest import MakeMesh
from tests.integration.training_support import ONE, Recorder, build_with_norm, make_trainer

STEPS = 4
SETTINGS: dict[str, Any] = {"checkpoint": Every(steps=100), "shards": 5}


def build_large() -> nn.Module:
    """Three buckets, and buffers."""
    return nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 8192), nn.ReLU(), nn.Linear(8192, 10))


class Ranges:
    """A middleware that notes who reduced which range; ``act`` comes before that, ``change`` after it."""

    def __init__(
        self,
        act: Callable[[ReduceOrder, str], object] = lambda order, worker: None,
        change: Callable[[ReduceResult], ReduceResult] = lambda result: result,
    ) -> None:
        self.reduced: list[tuple[int, str]] = []
        self._act = act
        self._change = change

    async def __call__(self, call: Call, call_next: Next) -> Any:
        if not call.context.task.endswith(".reduce"):
            return await call_next(call)
        order = call.args[0]
        assert isinstance(order, ReduceOrder)
        self._act(order, call.context.worker)
        result = await call_next(call)
        self.reduced.append((order.first, result.worker))
        return self._change(result)


async def train(mesh: Mesh, workers: int, reduce: str, steps: int = STEPS, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, reduce=reduce, **{"model": build_large, **SETTINGS, **changes})
    async with mesh, contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(mesh.worker(ONE))
        return await trainer.run(steps=steps)


@pytest.fixture
async def expected(make_mesh: MakeMesh) -> str:
    """The digest that the master comes to by itself."""
    return (await train(make_mesh("expected"), 1, "master")).digest


@pytest.mark.parametrize(
    "changes",
    [
        {"compression": NoCompression()},
        {"compression": Int8()},
        {"compression": TopK(0.05)},
        {"compression": LowRank(2)},
        {"aggregation": Median()},
        {"model": build_with_norm},  # its payload rides in the result
    ],
    ids=["plain", "int8", "top-k", "low rank", "median", "inline"],
)
async def test_the_bits_are_those_of_the_master(make_mesh: MakeMesh, changes: dict[str, Any]) -> None:
    by_master = await train(make_mesh("master"), 1, "master", **changes)
    ranges = Ranges()
    by_one = await train(make_mesh("one", middleware=[ranges]), 1, "workers", **changes)
    assert [first for first, _ in ranges.reduced] == [0] * STEPS
    by_three = await train(make_mesh("three"), 3, "workers", **changes)
    assert by_one == by_three == by_master


@pytest.mark.parametrize("compression", [Int8(), TopK(0.05)], ids=lambda each: each.name)
async def test_a_worker_that_dies_reducing_does_not_show(
    make_mesh: MakeMesh, plain: redis.Redis, compression: Compression
) -> None:
    expected = (await train(make_mesh("expected"), 1, "master", compression=compression)).digest
    doomed: list[Worker] = []
    deaths: list[str] = []

    async def die(call: Call, call_next: Next) -> Any:
        result = await call_next(call)
        if isinstance(result, ReduceResult) and result.worker == doomed[0].worker.decode():
            doomed[0].abandon()
            deaths.append(result.attempt)
            await asyncio.Future()
        return result

    mesh = make_mesh(middleware=[die], liveness_ttl=1.0)
    trainer = make_trainer(mesh, reduce="workers", model=build_large, compression=compression, **SETTINGS)
    async with mesh, mesh.worker(ONE) as worker, mesh.worker(ONE):
        doomed.append(worker)
        finished = await trainer.run(steps=STEPS)
    assert len(deaths) == 1
    assert finished.digest == expected
    assert not plain.keys("*reduced*")
    assert not plain.keys("*gradient:*")


@pytest.mark.parametrize(
    ("fault", "compression"),
    [("gone", Int8()), ("corrupt", Int8()), ("corrupt", TopK(0.05))],
    ids=["gone", "corrupt", "corrupt, with a memory"],
)
async def test_a_shard_whose_pieces_cannot_be_used_is_computed_again(
    make_mesh: MakeMesh, plain: redis.Redis, fault: str, compression: Compression
) -> None:
    expected = (await train(make_mesh("expected"), 1, "master", compression=compression)).digest
    recorder = Recorder()
    spoilt: list[object] = []

    def spoil(order: ReduceOrder, worker: str) -> None:
        if not spoilt and order.version == 1:
            (key,) = plain.keys(f"*gradient:1:3:{order.pieces[3].attempt}:{order.first}")
            spoilt.append(key)
            if fault == "gone":
                plain.delete(key)
            else:
                plain.setrange(key, 100, b"spoilt")

    mesh = make_mesh(middleware=[Ranges(spoil)], observers=[recorder])
    assert (await train(mesh, 2, "workers", compression=compression)).digest == expected
    (refusal,) = recorder.of(ShardRefused)
    assert (refusal.step, refusal.shard) == (2, 3)
    assert fault in refusal.reason
    assert refusal.worker


async def test_a_shard_whose_pieces_can_never_be_used_leaves_the_batch_out(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    recorder = Recorder()

    def spoil(order: ReduceOrder, worker: str) -> None:
        if order.version == 1:
            plain.delete(b"none", *plain.keys("*gradient:1:3:*"))

    mesh = make_mesh(middleware=[Ranges(spoil)], observers=[recorder])
    finished = await train(mesh, 2, "workers")
    assert (finished.step, finished.skipped) == (STEPS, (1,))
    (rollback,) = recorder.of(RolledBack)
    assert "shard 3 was refused 3 times: a piece of the gradient is gone" in rollback.reason


async def test_a_worker_that_reduces_wrongly_is_avoided(make_mesh: MakeMesh, expected: str) -> None:
    bad: list[str] = []

    def spoil(result: ReduceResult) -> ReduceResult:
        if result.worker == bad[0]:
            return dataclasses.replace(result, digests=tuple(bytes(16) for _ in result.digests))
        return result

    ranges = Ranges(lambda order, worker: bad.append(worker), spoil)
    finished = await train(make_mesh(middleware=[ranges]), 2, "workers")
    assert finished.digest == expected
    assert len({worker for _, worker in ranges.reduced}) == 2


async def test_a_handler_that_fails_again_and_again_ends_the_run(make_mesh: MakeMesh) -> None:
    def fail(order: ReduceOrder, worker: str) -> None:
        raise OSError("no room for it")

    with pytest.raises(
        TrainingError, match=r"could not be reduced by workers in 3 attempts: .*no room for it"
    ):
        await train(make_mesh(middleware=[Ranges(fail)]), 1, "workers")


async def test_by_default_the_master_reduces_until_workers_are_sooner_done(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    ranges = Ranges()
    assert (await train(make_mesh("here", middleware=[ranges]), 2, "auto")).digest == expected
    assert not ranges.reduced, "there is one server and one machine"
    asked: list[tuple[int, ...]] = []

    def pays(*figures: int) -> bool:
        asked.append(figures)
        return len(asked) == 2

    monkeypatch.setattr(reduction, "pays", pays)
    assert (await train(make_mesh("there", middleware=[ranges]), 1, "auto")).digest == expected
    assert len(ranges.reduced) == 1, "step 3, and then the master again"
    uplink_bytes, dense_bytes, nodes, hosts = asked[0]
    assert 0.2 < uplink_bytes / 5 / dense_bytes < 0.3
    assert (nodes, hosts) == (1, 0)
