"""Checkpoints beside the steps of a run: of one instant, complete or not there, and in nobody's way."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis
from torch import nn

from taskmesh import BrokerUnavailable, LeadershipLost, Mesh
from taskmesh.checkpoints.manifest import Manifest
from taskmesh.checkpoints.store import VersionStore
from taskmesh.events import Checkpointed, Committed, RolledBack
from taskmesh.keys import RunKeys
from taskmesh.testing import wait_until
from taskmesh.training import Every, Finished, OnDivergence, Trainer
from tests.integration.training_support import ONE, Recorder, make_trainer

MakeMesh = Callable[..., Mesh]
KEYS = RunKeys("test", "digits")
STEPS = 25


@contextlib.asynccontextmanager
async def workers(mesh: Mesh, count: int = 1) -> AsyncIterator[None]:
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(count):
            await stack.enter_async_context(mesh.worker(ONE))
        yield


async def train(mesh: Mesh, steps: int = STEPS, **changes: Any) -> tuple[Finished, list[Manifest]]:
    trainer = make_trainer(mesh, **changes)
    async with workers(mesh):
        return await trainer.run(steps=steps), await trainer.versions()


class Held:
    """Holds a version's checkpoint up after it was copied, until it is let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        self.arrived, self.let_go = asyncio.Event(), asyncio.Event()
        write_kept = VersionStore.write_kept

        async def held(store: VersionStore, number: int, *rest: Any) -> Any:
            if number == version:
                self.arrived.set()
                await self.let_go.wait()
            return await write_kept(store, number, *rest)

        monkeypatch.setattr(VersionStore, "write_kept", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    """The checkpoint of step 10."""
    return Held(monkeypatch, 10)


async def test_the_bytes_are_those_of_the_instant(make_mesh: MakeMesh, held: Held) -> None:
    """Nine more steps change parameters, moments and schedule before the first byte of step 10 is hashed."""
    held.let_go.set()
    _, straight = await train(make_mesh("straight"), 10)
    held.let_go.clear()
    mesh = make_mesh()
    trainer = make_trainer(mesh)

    def on_commit(committed: Committed) -> None:
        if committed.step == 19:
            held.let_go.set()

    async with workers(mesh):
        await trainer.run(steps=20, on_commit=on_commit)
        kept = {manifest.step: manifest for manifest in await trainer.versions()}
    expected, found = straight[-1], kept[10]
    assert found.version == 10
    assert expected.parts.keys() == found.parts.keys() == {"parameters", "tensors", "state", "index"}
    for name, part in expected.parts.items():
        assert found.parts[name].digests == part.digests, name


async def test_the_next_one_waits_and_is_not_left_out(mesh: Mesh, held: Held) -> None:
    recorder = Recorder()
    mesh.observers.add(recorder)
    trainer = make_trainer(mesh, checkpoint=Every(steps=10, keep=9))
    async with workers(mesh):
        running = asyncio.create_task(trainer.run(steps=STEPS))
        await wait_until(lambda: len(recorder.of(Committed)) == 19)
        await wait_until(lambda: _is_at(trainer, 20))
        await asyncio.sleep(0.1)
        assert await _is_at(trainer, 20), "its checkpoint is due, and the one before is on its way"
        held.let_go.set()
        await running
        assert [manifest.step for manifest in await trainer.versions()] == [0, 10, 20, STEPS]
    events = {event.step: event for event in recorder.of(Checkpointed)}
    assert list(events) == [0, 10, 20, STEPS]
    assert events[20].waited_seconds > 0.1 > events[10].waited_seconds
    assert 0 < events[20].copy_seconds < events[20].seconds
    assert 0 < events[20].written_bytes <= events[20].size_bytes


async def _is_at(trainer: Trainer, step: int) -> bool:
    status = await trainer.status()
    return status is not None and status.step == step


async def test_a_rollback_waits_for_the_one_on_its_way(mesh: Mesh, held: Held) -> None:
    trainer = make_trainer(mesh)
    asked: list[asyncio.Task[int]] = []

    def on_commit(committed: Committed) -> None:
        if committed.version == 12:
            asked.append(asyncio.create_task(trainer.rollback(to=10)))
            asyncio.get_running_loop().call_later(0.1, held.let_go.set)

    async with workers(mesh):
        finished = await trainer.run(steps=STEPS, on_commit=on_commit)
    assert finished.version == await asked[0] + STEPS - 10


async def test_a_divergence_goes_back_to_the_one_on_its_way(
    make_mesh: MakeMesh, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh)
    judgements = itertools.count(1)

    def judge(*_: Any) -> str | None:
        if next(judgements) != 13:
            return None
        asyncio.get_running_loop().call_later(0.1, held.let_go.set)
        return "for a test"

    monkeypatch.setattr(OnDivergence, "judge", judge)
    async with workers(mesh):
        await trainer.run(steps=STEPS)
    assert [(event.version, event.restored) for event in recorder.of(RolledBack)] == [(13, 10)]


async def test_a_failure_is_loud_and_loses_nothing(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, plain: redis.Redis
) -> None:
    expected, _ = await train(make_mesh("other"))
    mesh = make_mesh()
    keep = VersionStore.keep

    async def keep_or_not(store: VersionStore, manifest: Manifest, *rest: Any) -> None:
        if manifest.version == 20:
            raise BrokerUnavailable("it has gone")
        await keep(store, manifest, *rest)

    monkeypatch.setattr(VersionStore, "keep", _with_names(keep_or_not))
    with pytest.raises(BrokerUnavailable, match="it has gone"):
        await train(mesh)
    assert "run digits: a checkpoint failed: it has gone; those before it stay" in caplog.text
    monkeypatch.setattr(VersionStore, "keep", keep)
    again = make_mesh()
    trainer = make_trainer(again)
    async with workers(again):
        assert [manifest.step for manifest in await trainer.versions()] == [0, 10]
        assert (await trainer.run(steps=STEPS)).digest == expected.digest
        kept = await trainer.versions()
    assert set(plain.keys("*{test:run:digits:*}:chunk:*")) == {
        key for manifest in kept for key in manifest.keys(KEYS)
    }
    assert not plain.keys("*{test:run:digits:*}:transient:*")


def _with_names(keep: Callable[..., Awaitable[None]]) -> Any:
    async def called(
        store: VersionStore, manifest: Manifest, token: int, dropped: Any = (), stands_for: Any = None
    ) -> None:
        await keep(store, manifest, token, dropped, stands_for)

    return called


async def test_a_run_that_is_stopped_completes_the_one_on_its_way(mesh: Mesh, held: Held) -> None:
    trainer = make_trainer(mesh)
    async with workers(mesh):
        running = asyncio.create_task(trainer.run(steps=STEPS))
        await held.arrived.wait()
        running.cancel()
        asyncio.get_running_loop().call_later(0.1, held.let_go.set)
        await asyncio.wait({running})
        assert running.cancelled()
        assert [manifest.step for manifest in await trainer.versions()] == [0, 10]


async def test_one_that_does_not_come_to_an_end_is_given_up(
    mesh: Mesh, held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("taskmesh.training.master.saver.STOP_PATIENCE", 0.1)
    trainer = make_trainer(mesh)
    async with workers(mesh):
        running = asyncio.create_task(trainer.run(steps=STEPS))
        await held.arrived.wait()
        running.cancel()
        await asyncio.wait({running})
        assert "a checkpoint was given up" in caplog.text
        held.let_go.set()
        assert (await trainer.run(steps=STEPS)).step == STEPS


async def test_a_master_that_was_replaced_meanwhile_is_refused(
    mesh: Mesh, held: Held, plain: redis.Redis
) -> None:
    trainer = make_trainer(mesh)
    async with workers(mesh):
        running = asyncio.create_task(trainer.run(steps=STEPS))
        await held.arrived.wait()
        plain.hincrby(KEYS.lease, "token", 1)
        held.let_go.set()
        with pytest.raises(LeadershipLost):
            await running
        (kept,) = await trainer.versions()
    assert kept.step == 0
    assert set(plain.keys("*:chunk:*")) == set(kept.keys(KEYS))


async def test_checkpoints_by_the_clock_do_not_show(make_mesh: MakeMesh) -> None:
    expected, _ = await train(make_mesh("other"))
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    finished, kept = await train(mesh, checkpoint=Every(seconds=1e-6, keep=99))
    assert finished.digest == expected.digest
    assert (kept[0].step, kept[-1].step) == (0, STEPS)
    assert len(kept) > 3, "as many as there is time for"
    assert all(event.waited_seconds < 0.05 for event in recorder.of(Checkpointed)), (
        "and no step waits for one"
    )


async def test_frozen_layers_are_written_once(mesh: Mesh) -> None:
    """Their parameters are equal in every checkpoint, and stay as long as one of these does."""

    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(64, 20_000), nn.Linear(20_000, 10))
        model[0].requires_grad_(False)
        return model

    recorder = Recorder()
    mesh.observers.add(recorder)
    trainer = make_trainer(
        mesh, model=build, batch_size=16, shards=2, checkpoint=Every(steps=2, keep=2), schedule=None
    )
    async with workers(mesh):
        finished = await trainer.run(steps=8)
        assert (await trainer.run(steps=8)).digest == finished.digest
        assert (await trainer.versions())[-1].version == 8
        model = await trainer.load(8)
    events = recorder.of(Checkpointed)
    assert [event.step for event in events] == [0, 2, 4, 6, 8]
    frozen = (
        sum(parameter.nbytes for parameter in model.parameters()) * 64 // 75
    )  # but for the chunk at the edge
    for event in events[1:]:
        assert event.size_bytes - event.written_bytes > frozen - 2**21


async def test_nothing_is_borrowed_from_what_is_damaged(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    """A run that goes back behind a damaged checkpoint comes to equal chunks again, and must write them."""
    await train(make_mesh(), 10)
    for key in plain.keys("*:chunk:10:*"):
        plain.setrange(key, 0, b"?!")
    mesh = make_mesh()
    trainer = make_trainer(mesh, checkpoint=Every(steps=10, keep=9))
    async with workers(mesh):
        finished = await trainer.run(steps=10)
        damaged, again = [manifest for manifest in await trainer.versions() if manifest.step == 10]
        assert (damaged.version, again.version) == (10, finished.version)
        assert damaged.parts["parameters"].digests == again.parts["parameters"].digests
        newest = await trainer.store.load_newest()
    assert newest is not None
    assert newest[0] == again
