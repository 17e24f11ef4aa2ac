"""Shards that are late are computed by somebody else as well, and it does not show in the bits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import redis
from torch import nn

from taskmesh.errors import ConfigurationError
from taskmesh.events import ShardRepeated
from taskmesh.results.handle import Held
from taskmesh.tasks import Call, Next
from taskmesh.training import DGC, LowRank, NoCompression, Synchronous, TopK
from taskmesh.training.master.backups import find_late
from tests.conftest import MakeMesh
from tests.integration.training_support import ONE, Recorder, make_trainer


def build_large() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))


async def never(call: Call, call_next: Next) -> Any:
    """A worker that has a shard and does not begin with it."""
    await asyncio.Future()


async def never_tells(call: Call, call_next: Next) -> Any:
    """A worker that sends a gradient, and never says so."""
    await call_next(call)
    await asyncio.Future()


@pytest.mark.parametrize("fault", [never, never_tells])
async def test_a_shard_that_does_not_come_is_computed_elsewhere(
    make_mesh: MakeMesh, plain: redis.Redis, fault: Any
) -> None:
    changes: dict[str, Any] = {"model": build_large, "compression": NoCompression(), "shards": 4}
    alone = make_mesh("alone")
    trainer = make_trainer(alone, **changes)
    async with alone, alone.worker(ONE):
        expected = await trainer.run(steps=4)

    recorder = Recorder()
    stuck = make_mesh("mixed", middleware=[fault])
    mesh = make_mesh("mixed", observers=[recorder])
    changes["mode"] = Synchronous(backups=2)
    make_trainer(stuck, **changes)
    trainer = make_trainer(mesh, **changes)
    async with mesh, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(stuck)
        worker = await stack.enter_async_context(stuck.worker(ONE))
        await stack.enter_async_context(mesh.worker(ONE))
        finished = await trainer.run(steps=4)
        ledger = await trainer.ledger()
        name = worker.worker.decode()
    assert finished.digest == expected.digest
    assert name in {event.worker for event in recorder.of(ShardRepeated)}
    assert name not in {share.worker for entry in ledger for share in entry.shares}
    assert not plain.keys("*gradient*"), "the pieces of both attempts are gone"


def test_those_that_are_out_for_longest_are_late() -> None:
    held = {shard: Held("worker", seconds) for shard, seconds in enumerate((0.1, 0.5, 0.2, 0.9, 0.21))}
    assert find_late(held, (0.1, 0.1, 5.0), 9) == [3, 1, 4]
    assert find_late(held, (0.1,), 2) == [3, 1]
    assert find_late(held, (1.0,), 9) == []


@pytest.mark.parametrize("compression", [TopK(0.1), LowRank(), DGC(0.1, momentum=0.0)], ids=lambda c: c.name)
def test_nobody_but_its_holder_can_compute_what_is_remembered(make_mesh: MakeMesh, compression: Any) -> None:
    with pytest.raises(ConfigurationError, match="only the worker that holds what"):
        make_trainer(make_mesh(), compression=compression, mode=Synchronous(backups=1))


def test_fewer_than_none_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="backups from 0"):
        Synchronous(backups=-1)
