"""What a run refuses, and what it must not lose: resumed with other settings, asked to go back, on a full server."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import redis
import torch
from torch import Tensor, nn

from taskmesh import BrokerUnavailable, Mesh, TaskmeshError, TrainingError
from taskmesh.checkpoints.store import VersionStore
from taskmesh.events import Committed, Event, RolledBack
from taskmesh.scoring import from_run
from taskmesh.testing import RedisServer, wait_until
from taskmesh.training import Every, Finished, NoCompression, OnDivergence
from tests.conftest import settings_for_tests
from tests.integration.training_support import (
    IMAGES,
    Digits,
    build,
    loss,
    make_trainer,
    workers,
)

MakeMesh = Callable[..., Mesh]


async def train(mesh: Mesh, steps: int, count: int = 1, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, **changes)
    async with workers(mesh, count):
        return await trainer.run(steps=steps)


def build_transposed() -> nn.Module:
    """As many values as ``build``, under other names."""
    return nn.Sequential(nn.Flatten(), *build().children())


def _with_norm_and_dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 10))


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"shards": 4}, "shards 8, not 4"),
        ({"compression": NoCompression()}, "compression int8/2048, not none"),
        ({"model": build_transposed}, "another model"),
        ({"optimizer": sgd}, "optimizer or schedule is another"),
        ({"schedule": None}, "optimizer or schedule is another"),
    ],
    ids=["shards", "compression", "model", "optimizer", "schedule"],
)
async def test_a_run_is_not_resumed_with_another_setup(
    make_mesh: MakeMesh, changes: dict[str, Any], match: str
) -> None:
    await train(make_mesh(), 1)
    with pytest.raises(TaskmeshError, match=match):
        await train(make_mesh(), 2, **changes)


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        (torch.optim.NAdam, lambda it: torch.optim.lr_scheduler.OneCycleLR(it, 0.02, total_steps=20)),
        (torch.optim.ASGD, lambda it: torch.optim.lr_scheduler.ReduceLROnPlateau(it, patience=1, factor=0.5)),
        (
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True),
            lambda it: torch.optim.lr_scheduler.SequentialLR(
                it,
                [torch.optim.lr_scheduler.ConstantLR(it), torch.optim.lr_scheduler.CosineAnnealingLR(it, 10)],
                [3],
            ),
        ),
    ],
    ids=["nadam-onecycle", "asgd-plateau", "sgd-sequential"],
)
async def test_a_run_that_was_interrupted_comes_to_the_same_bits(
    make_mesh: MakeMesh, optimizer: Any, schedule: Any
) -> None:
    """BatchNorm's buffers, moments and schedule are all in the checkpoint, and dropout goes by the step."""
    changes = {"optimizer": optimizer, "schedule": schedule, "model": _with_norm_and_dropout}
    await train(make_mesh(), 4, **changes)
    resumed = await train(make_mesh(), 9, 2, **changes)
    assert resumed.digest == (await train(make_mesh("straight"), 9, **changes)).digest


async def test_a_rollback_that_was_asked_for_is_answered_when_the_run_ends(
    mesh: Mesh, plain: redis.Redis
) -> None:
    """Whoever asked must not wait for ever because the run ended on the way."""
    trainer = make_trainer(mesh)
    running = asyncio.create_task(trainer.run(steps=5))
    await wait_until(lambda: plain.xlen("taskmesh:{test:digits:0}:tasks:normal") == 8)
    asked = asyncio.create_task(trainer.rollback(to=0))  # no worker: the step never ends
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(TaskmeshError, match="ended"):
        await asyncio.wait_for(asked, 3.0)


async def test_a_run_that_is_stopped_while_it_goes_back_keeps_no_mixture(
    make_mesh: MakeMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its master holds the old version's parameters by then, and the newer one is the current still."""
    expected = (await train(make_mesh("straight"), 20)).digest
    mesh = make_mesh()
    trainer = make_trainer(mesh)
    asked: list[asyncio.Task[int]] = []
    reached = asyncio.Event()
    commit = VersionStore.commit

    async def commit_or_wait(store: VersionStore, what: Any, token: int) -> None:
        if what.manifest.restored_from is not None:
            reached.set()
            await asyncio.Future()
        await commit(store, what, token)

    def on_commit(committed: Committed) -> None:
        if committed.step == 13:
            asked.append(asyncio.create_task(trainer.rollback(to=10)))

    async with workers(mesh, 1):
        with monkeypatch.context() as patch:
            patch.setattr(VersionStore, "commit", commit_or_wait)
            running = asyncio.create_task(trainer.run(steps=20, on_commit=on_commit))
            await reached.wait()
            running.cancel()
            with pytest.raises(TrainingError, match="ended"):
                await asyncio.wait_for(asked[0], 5.0)
            await asyncio.gather(running, return_exceptions=True)
        assert (await trainer.run(steps=20)).digest == expected


async def test_a_rollback_that_fails_half_way_ends_the_run(mesh: Mesh, monkeypatch: Any) -> None:
    """Its master holds the old version's parameters already, and must not go on from the newer one with them."""
    trainer = make_trainer(mesh)
    asked: list[asyncio.Task[int]] = []
    commit = VersionStore.commit

    async def commit_or_not(store: VersionStore, what: Any, token: int) -> None:
        if what.manifest.restored_from is not None:
            raise BrokerUnavailable("away")
        await commit(store, what, token)

    monkeypatch.setattr(VersionStore, "commit", commit_or_not)

    def on_commit(committed: Committed) -> None:
        if committed.version == 12:
            asked.append(asyncio.create_task(trainer.rollback(to=10)))

    async with workers(mesh, 1):
        with pytest.raises(BrokerUnavailable):
            await trainer.run(steps=20, on_commit=on_commit)
        with pytest.raises(BrokerUnavailable):
            await asked[0]


class _Constants(nn.Module):
    """A model with float buffers that no forward pass changes: a mask with -inf, and odd fractions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("fractions", torch.arange(1, 1000) / 7)

    def forward(self, rows: Tensor) -> Tensor:
        return self.inner(rows)  # type: ignore[no-any-return]


async def test_buffers_that_do_not_change_stay_as_they_are(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, model=_Constants, batch_size=101, shards=7)
    async with workers(mesh, 1):
        await trainer.run(steps=10)
        model = await trainer.load()
    assert torch.equal(model.get_buffer("mask"), torch.tensor([0.0, -torch.inf]))
    assert torch.equal(model.get_buffer("fractions"), torch.arange(1, 1000) / 7)


class _Noisy(Digits):
    """Augments with all three generators that people use."""

    def fetch(self, indices: Any) -> tuple[Tensor, Tensor]:
        inputs, targets = super().fetch(indices)
        noise = np.random.standard_normal(64).astype(np.float32) * random.random()
        return inputs + torch.from_numpy(noise) + torch.rand(64), targets


async def test_whatever_generator_the_data_draw_from_the_bits_are_the_same(make_mesh: MakeMesh) -> None:
    digests = {
        (await train(make_mesh(name), 5, count, data=_Noisy())).digest for name, count in (("a", 1), ("b", 3))
    }
    assert len(digests) == 1


async def test_a_model_that_is_loaded_beside_a_shard_takes_none_of_its_numbers(make_mesh: MakeMesh) -> None:
    """A scorer in the same process builds its model, which draws its first weights, in a thread of its own."""
    mesh = make_mesh()
    source = from_run("digits", build=build)
    loading: list[asyncio.Future[Any]] = []

    def disturbed(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if disturb and not loading:
            loading.append(asyncio.run_coroutine_threadsafe(source.get(mesh), loop))  # type: ignore[arg-type]
            threading.Event().wait(0.3)
        return loss(model, batch)

    loop, disturb = asyncio.get_running_loop(), True
    disturbed_digest = (await train(mesh, 3, loss=disturbed)).digest
    assert loading
    assert disturbed_digest == (await train(make_mesh("quiet"), 3)).digest


class _Caching(nn.Module):
    """Keeps what it derived from its parameters' device and dtype, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()
        self.scale: Tensor | None = None

    def forward(self, rows: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.full((10,), 2.0)
        return self.inner(rows) * self.scale  # type: ignore[no-any-return]


async def test_a_model_that_caches_tensors_is_trained_after_it_predicted(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, model=_Caching)
    running = asyncio.create_task(trainer.run(steps=2))
    await wait_until(trainer.status)
    predicting = asyncio.create_task(trainer.predict(IMAGES[:4], version=0))
    await asyncio.sleep(0.05)
    running.cancel()  # so that the new worker predicts first
    async with workers(mesh, 1):
        await predicting
        assert (await trainer.run(steps=2)).step == 2


async def test_another_run_under_the_same_name_gets_its_own_parameters(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """The run was removed by hand; a worker that stays must not take the old parameters for the new ones."""
    mesh, again = make_mesh(), make_mesh()
    first, second = make_trainer(mesh), make_trainer(again, optimizer=sgd, schedule=None)
    async with workers(mesh, 1), again:
        await first.run(steps=2)
        plain.delete(*plain.keys("*run:digits*"))
        finished = await second.run(steps=3)
    expected = await train(make_mesh("fresh"), 3, optimizer=sgd, schedule=None)
    assert finished.digest == expected.digest


async def test_a_worker_with_another_setup_is_found_out(make_mesh: MakeMesh) -> None:
    """It would compute other bits, and nobody would see it."""
    mesh, stranger = make_mesh(), make_mesh()
    trainer = make_trainer(mesh)
    make_trainer(stranger, seed=1)
    async with mesh, workers(stranger, 1):
        with pytest.raises(TrainingError, match=r"seed 1, .*seed 0, "):
            await trainer.run(steps=1)


async def test_a_shard_in_which_nothing_counts_is_no_divergence(mesh: Mesh) -> None:
    """Tokens may be masked; here those of all digits but the first ten images."""

    def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        wanted = torch.isin(batch[0].sum(dim=1), IMAGES[:10].sum(dim=1))
        return (loss(model, batch) * wanted).sum(), int(wanted.sum())

    trainer = make_trainer(mesh, loss=masked, data=Digits(40), batch_size=20)
    async with workers(mesh, 1):
        finished = await trainer.run(steps=4)
    assert (finished.version, finished.skipped) == (4, ())


async def test_a_batch_in_which_nothing_counts_is_left_out(mesh: Mesh) -> None:
    def masked(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        wanted = torch.isin(batch[0].sum(dim=1), IMAGES[:1].sum(dim=1))
        return (loss(model, batch) * wanted).sum(), int(wanted.sum())

    trainer = make_trainer(mesh, loss=masked, data=Digits(40), batch_size=20)
    async with workers(mesh, 1):
        finished = await trainer.run(steps=2)
    assert len(finished.skipped) in (1, 2)


async def test_moments_that_overflow_are_a_divergence(mesh: Mesh) -> None:
    """The gradient is finite, its square is not: Adam would never move those parameters again."""

    def steep(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss(model, batch) * 1e25

    trainer = make_trainer(mesh, loss=steep, rollback=OnDivergence(rollbacks=0))
    async with workers(mesh, 1):
        with pytest.raises(TrainingError, match="optimizer's state is not finite"):
            await trainer.run(steps=3)


async def test_a_checkpoint_that_is_lost_under_the_run_is_written_again(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """After a rollback the workers have it from there. The master holds those parameters: nothing is taken back."""
    expected = await train(make_mesh("other"), 15)
    mesh = make_mesh()
    trainer = make_trainer(mesh)

    def on_commit(committed: Committed) -> None:
        if committed.version == 12:
            asked.append(asyncio.create_task(trainer.rollback(to=10)))

    class Thief:
        def on_event(self, event: Event) -> None:
            if isinstance(event, RolledBack):
                assert plain.delete(*plain.keys("*{test:run:digits:0}:chunk:10:*"))

    asked: list[asyncio.Task[int]] = []
    mesh.observers.add(Thief())
    async with workers(mesh, 1):
        finished = await trainer.run(steps=15, on_commit=on_commit)
        assert (await trainer.store.load_parameters(await asked[0]))[1].nbytes > 1000
    assert (finished.step, finished.digest) == (15, expected.digest)


async def test_a_full_server_is_waited_for(caplog: pytest.LogCaptureFixture) -> None:
    with RedisServer() as server:
        mesh = Mesh("test", settings=settings_for_tests(server.url))
        trainer = make_trainer(mesh, checkpoint=Every(steps=3, keep=2))

        def on_commit(committed: Committed) -> None:
            if committed.step == 4:
                server.command("CONFIG", "SET", "maxmemory", "1mb")
                server.command("CONFIG", "SET", "maxmemory-policy", "noeviction")

        async def make_room() -> None:
            await wait_until(lambda: "no room" in caplog.text)
            server.command("CONFIG", "SET", "maxmemory", "0")

        async with workers(mesh, 2):
            making = asyncio.create_task(make_room())
            finished = await trainer.run(steps=8, on_commit=on_commit)
            await making
    assert finished.step == 8


async def test_a_run_that_is_asked_to_stop_keeps_the_steps_it_has_taken(make_mesh: MakeMesh) -> None:
    expected = await train(make_mesh("whole"), 25)
    mesh = make_mesh("stopped")
    trainer = make_trainer(mesh, checkpoint=Every(steps=1000, keep=2))
    reached = asyncio.Event()
    async with workers(mesh, 1):
        running = asyncio.create_task(
            trainer.run(steps=25, on_commit=lambda committed: committed.step == 13 and reached.set())
        )
        await asyncio.wait_for(reached.wait(), 30)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        kept = await trainer.versions()
        assert kept[-1].step >= 13
        finished = await trainer.run(steps=25)
    assert finished.digest == expected.digest


async def test_the_ledger_of_a_run_that_was_taken_over_names_what_each_version_was_formed_from(
    make_mesh: MakeMesh,
) -> None:
    """A master that died had committed versions that its successor did not go on from."""
    mesh = make_mesh()
    trainer = make_trainer(mesh)

    class Died(Exception):
        pass

    def die(committed: Committed) -> None:
        if committed.step == 17:
            raise Died

    async with workers(mesh, 1):
        with pytest.raises(Died):
            await trainer.run(steps=25, on_commit=die)
        await trainer.run(steps=25)
        entries = {entry.version: entry for entry in await trainer.ledger()}
    version, steps = max(entries), []
    while version in entries:
        steps.append(entries[version].step)
        version = entries[version].parent
    assert steps == list(range(25, 0, -1))
