"""Asynchronous steps: each shard is one, as late as it may be and no later, and none is lost or counted twice."""

from __future__ import annotations

import asyncio
import heapq
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.training.audit import account
from taskmesh.errors import CheckpointError, ConfigurationError
from taskmesh.events import RolledBack
from taskmesh.tasks import Call, Next
from taskmesh.tensors import FlatModel
from taskmesh.testing import RedisServer, wait_until
from taskmesh.training import (
    Asynchronous,
    Every,
    Finished,
    Int8,
    Median,
    NoCompression,
    OnDivergence,
    TopK,
    Trainer,
)
from taskmesh.training.master.stream import may_be_taken
from taskmesh.training.plan import split
from tests.conftest import MakeMesh
from tests.integration.training_support import (
    IMAGES,
    LABELS,
    ONE,
    Digits,
    Recorder,
    build_with_norm,
    loss,
    make_trainer,
)

SAMPLES, SHARDS = 300, 4
STREAM: dict[str, Any] = {
    "data": Digits(SAMPLES),
    "batch_size": 64,
    "shards": SHARDS,
    "deterministic": False,
    "mode": Asynchronous(staleness=5),
    "checkpoint": Every(steps=10, keep=99),
}


class Poisoned(Digits):
    """Sample 77 is not finite: the batches with it are left out, after a rollback each."""

    def fetch(self, indices: Any) -> Any:
        inputs, targets = super().fetch(indices)
        return (inputs * math.nan if 77 in indices else inputs), targets


def build_large() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10))


async def audit(trainer: Trainer, finished: Finished) -> dict[str, int]:
    return await account(await trainer.ledger(), finished.version, SAMPLES, SHARDS, trainer.indices)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": build_with_norm, "compression": NoCompression()},
        {"model": build_large, "compression": NoCompression()},
    ],
    ids=["int8", "plain, with norm", "plain, large"],
)
async def test_it_learns_and_a_replay_comes_to_the_same_bits(
    make_mesh: MakeMesh, changes: dict[str, Any]
) -> None:
    mesh = make_mesh()
    trainer = make_trainer(mesh, **STREAM, **changes)
    async with mesh, mesh.worker(ONE), mesh.worker(ONE):
        first = await trainer.run(steps=45)
        finished = await trainer.run(steps=90)
        assert finished.loss < 2.0 < math.log(10)
        ledger = await trainer.ledger()
        steps = {0: 0} | {entry.version: entry.step for entry in ledger}
        staleness = [entry.step - 1 - steps[entry.base] for entry in ledger]
        assert 3 <= max(staleness) <= 5, "four are under way at once"
        assert first.owed
        found = await audit(trainer, finished)
        assert (found["committed_twice"], found["never_committed"]) == (0, 0)
        owed = [split(await trainer.indices(each.batch), SHARDS)[each.shard] for each in finished.owed]
        assert found["owed"] == sum(map(len, owed))
        assert [version.matches for version in await trainer.replay()] == [True] * 90
        assert len(await trainer.replay(20, 30)) == 10, "it begins where nothing was under way"
        worker = ledger[-1].shares[0].worker
        formed = await trainer.form(without=worker, commit=True)
        assert formed.left_out == sum(entry.shares[0].worker == worker for entry in ledger)
        after = await trainer.run(steps=95)
        assert all(version.matches for version in await trainer.replay(formed.version))
        assert after.step == 95


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


async def test_a_step_is_what_it_says(make_mesh: MakeMesh) -> None:
    """Gradients of older parameters, momentum of all, steps by 1 / (1 + staleness), written down plainly."""
    mesh = make_mesh()
    changes = {"model": plain_model, "optimizer": sgd, "schedule": None, "compression": NoCompression()}
    trainer = make_trainer(mesh, **STREAM, **changes)
    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=12)
        wanted = FlatModel(await trainer.load()).values.clone()
        flat = FlatModel(await trainer.load(0))
        ledger = await trainer.ledger()
        batches = {entry.batch: await trainer.indices(entry.batch) for entry in ledger}
    optimizer = sgd(flat.model.parameters())
    past = {0: flat.values.clone()}
    for entry in ledger:
        now = flat.values.clone()
        flat.values.copy_(past[entry.base])
        chosen = list(split(batches[entry.batch], SHARDS)[entry.shares[0].shard])
        optimizer.zero_grad()
        loss(flat.model, (IMAGES[chosen], LABELS[chosen])).mean().backward()  # type: ignore[no-untyped-call]
        flat.values.copy_(now)
        optimizer.step()
        flat.values.copy_(now + (flat.values - now) / (1 + entry.parent - entry.base))
        past[entry.version] = flat.values.clone()
    np.testing.assert_allclose(flat.values.numpy(), wanted.numpy(), rtol=1e-4, atol=1e-6)


async def test_nothing_gets_older_than_it_may(make_mesh: MakeMesh) -> None:
    """A worker that hesitates is waited for when its shard is as old as it may be; one that dies is replaced."""
    go_on = asyncio.Event()
    held: list[Call] = []

    async def hesitate(call: Call, call_next: Next) -> Any:
        held.append(call)
        await go_on.wait()
        return await call_next(call)

    slow, mesh = make_mesh(middleware=[hesitate], liveness_ttl=1.0), make_mesh(liveness_ttl=1.0)
    make_trainer(slow, **STREAM)
    trainer = make_trainer(mesh, **STREAM)
    steps: list[int] = []
    async with slow, mesh, slow.worker(ONE) as slow_worker, slow.worker(ONE) as doomed:
        running = asyncio.create_task(trainer.run(steps=30, on_commit=lambda event: steps.append(event.step)))
        await wait_until(lambda: len(held) == 2)
        names = {slow_worker.worker.decode(), doomed.worker.decode()}
        async with mesh.worker(ONE):
            await wait_until(lambda: len(steps) == 4)  # theirs are of version 0: steps 5 and 6 at the latest
            go_on.set()
            doomed.abandon()
            await running
            ledger = await trainer.ledger()
            found = await audit(trainer, running.result())
            assert all(version.matches for version in await trainer.replay())
    by_version = {0: 0} | {entry.version: entry.step for entry in ledger}
    staleness = [entry.step - 1 - by_version[entry.base] for entry in ledger]
    assert max(staleness) <= 5
    assert names & {share.worker for entry in ledger[:7] for share in entry.shares}
    assert (found["committed_twice"], found["never_committed"]) == (0, 0)


async def test_a_master_that_is_lost_loses_no_sample(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    trainer = make_trainer(mesh, **STREAM)

    def lose(committed: Any) -> None:
        if committed.step == 27:
            raise OSError("lost")

    async with mesh, mesh.worker(ONE):
        with pytest.raises(OSError, match="lost"):
            await trainer.run(steps=60, on_commit=lose)
    mesh = make_mesh()
    trainer = make_trainer(mesh, **STREAM)
    async with mesh, mesh.worker(ONE):
        finished = await trainer.run(steps=60)
        assert finished.version > 60
        found = await audit(trainer, finished)
        assert (found["committed_twice"], found["never_committed"]) == (0, 0)
        assert all(version.matches for version in await trainer.replay())


async def test_batches_that_are_not_finite_are_left_out(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    changes = {**STREAM, "data": Poisoned(SAMPLES), "rollback": OnDivergence(recomputes=0, rollbacks=9)}
    trainer = make_trainer(mesh, **changes)
    async with mesh, mesh.worker(ONE), mesh.worker(ONE):
        finished = await trainer.run(steps=50)
        assert finished.skipped
        assert all(each.batch not in finished.skipped for each in finished.owed)
        assert len(recorder.of(RolledBack)) == len(finished.skipped)
        assert (await audit(trainer, finished))["committed_twice"] == 0
        assert all(version.matches is not False for version in await trainer.replay())


async def test_parameters_that_the_server_has_lost_are_sent_again(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "taskmesh.training")
    # As on another machine: what the master has is not offered to the workers here.
    monkeypatch.setattr("taskmesh.training.master.lead.socket.gethostname", lambda: "elsewhere")
    with RedisServer() as bulk:
        mesh = make_mesh(bulk_url=bulk.url)
        trainer = make_trainer(mesh, **STREAM)

        def lose(committed: Any) -> None:
            if committed.step in (8, 17):
                bulk.command("FLUSHALL")

        async with mesh, mesh.worker(ONE):
            finished = await trainer.run(steps=30, on_commit=lose)
            found = await audit(trainer, finished)
            assert (found["committed_twice"], found["never_committed"]) == (0, 0)
            assert all(version.matches for version in await trainer.replay())
        assert "the shard is ordered again" in caplog.text
        assert bulk.command("KEYS", "*") == []


async def test_a_replay_that_cannot_begin_says_why(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    trainer = make_trainer(mesh, **{**STREAM, "checkpoint": Every(steps=10, keep=1)})
    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=25)
        with pytest.raises(
            CheckpointError, match=r"its gradient is of version .*nothing was under way|is kept"
        ):
            await trainer.replay()


@given(st.integers(0, 6), st.integers(1, 9), st.randoms(use_true_random=False))
def test_whatever_comes_first_all_are_in_time_and_something_can_always_be_taken(
    staleness: int, shards: int, chance: Any
) -> None:
    at_once, step, taken = min(shards, staleness + 1), 0, 0
    under_way: list[tuple[float, int]] = []  # when it comes, how many steps had been taken
    for _ in range(60):
        while len(under_way) < at_once:
            heapq.heappush(under_way, (step + 20 * chance.random() ** 4, step))
        places = range(len(under_way))
        allowed = [
            place
            for place in places
            if may_be_taken(step, [under_way[other][1] for other in places if other != place], staleness)
        ]
        assert allowed, "the oldest may always be taken"
        place = min(allowed, key=lambda each: under_way[each][0])
        assert step - under_way.pop(place)[1] <= staleness
        heapq.heapify(under_way)
        step, taken = step + 1, taken + 1
    assert taken == 60


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"deterministic": True}, "asynchronous steps and deterministic=True"),
        ({"aggregation": Median()}, "each step is of one shard alone"),
        ({"compression": TopK(0.1)}, "nothing asynchronous should wait for one worker"),
        ({"reduce": "workers"}, "there is nothing to reduce"),
        ({"downlink": Int8()}, "do not come back to the older one"),
    ],
)
def test_what_it_does_not_go_with(make_mesh: MakeMesh, choices: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        make_trainer(make_mesh(), **{**STREAM, **choices})


def test_a_staleness_below_none_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="staleness from 0"):
        Asynchronous(staleness=-1)
