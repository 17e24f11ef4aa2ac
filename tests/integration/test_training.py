"""Training over a real server: what is learnt, and that no death, fault or number of workers shows in it."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import redis
import torch
from torch import nn

from taskmesh import Mesh, TrainingError
from taskmesh.events import Committed, RolledBack
from taskmesh.keys import RunKeys
from taskmesh.tensors import FlatModel
from taskmesh.testing import RedisCluster, RedisServer, fail_at, wait_until
from taskmesh.training import Every, Finished, NoCompression, Trainer
from tests.conftest import settings_for_tests
from tests.integration.training_support import (
    IMAGES,
    LABELS,
    ONE,
    SAMPLES,
    Digits,
    Recorder,
    adam,
    build,
    build_wide,
    build_with_norm,
    loss,
    make_trainer,
    start_program,
    workers,
)

MakeMesh = Callable[..., Mesh]
STEPS = 25


async def train(mesh: Mesh, steps: int = STEPS, count: int = 2, **changes: Any) -> Finished:
    trainer = make_trainer(mesh, **changes)
    async with workers(mesh, count):
        return await trainer.run(steps=steps)


@pytest.fixture
async def expected(make_mesh: MakeMesh) -> str:
    """The digest that an undisturbed run of ``STEPS`` steps comes to."""
    return (await train(make_mesh("expected"))).digest


async def test_it_learns_to_read_digits(make_mesh: MakeMesh) -> None:
    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])
    trainer = make_trainer(mesh, model=build_wide, schedule=None)
    seen: list[Committed] = []
    async with workers(mesh, 2):
        finished = await trainer.run(steps=100, on_commit=seen.append)
        share = await trainer.evaluate(IMAGES[SAMPLES:], LABELS[SAMPLES:])
    assert [event.step for event in seen] == list(range(1, 101))
    assert recorder.of(Committed) == seen
    assert seen[0].loss > 2.0
    assert finished.loss < 0.2
    assert share > 0.95
    assert sum(event.uplink_bytes for event in seen) / sum(event.dense_bytes for event in seen) <= 0.255


async def test_every_sample_is_counted_once_in_a_data_epoch(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, data=Digits(103), batch_size=32, shards=4)
    async with workers(mesh, 2):
        await trainer.run(steps=8)
        ledger = await trainer.ledger()
    assert [entry.version for entry in ledger] == list(range(1, 9))
    assert [sum(entry.samples) for entry in ledger] == [32, 32, 32, 7] * 2
    for epoch in (ledger[:4], ledger[4:]):
        counted = Counter(
            itertools.chain.from_iterable([await trainer.indices(entry.batch) for entry in epoch])
        )
        assert counted == Counter(range(103))
    for entry in ledger:
        assert [share.shard for share in entry.shares] == list(range(len(entry.samples)))


@pytest.mark.parametrize("count", [1, 3])
async def test_the_number_of_workers_does_not_show(make_mesh: MakeMesh, expected: str, count: int) -> None:
    assert (await train(make_mesh(), count=count)).digest == expected


async def test_a_worker_that_dies_in_mid_step_does_not_show(make_mesh: MakeMesh, expected: str) -> None:
    mesh = make_mesh()
    trainer = make_trainer(mesh)
    async with workers(mesh, 1), mesh.worker(ONE) as dying:
        fault = fail_at(dying, "finished", 20)
        finished = await trainer.run(steps=STEPS)
        ledger = await trainer.ledger()
    assert fault.passes >= 20
    assert finished.digest == expected
    assert [entry.step for entry in ledger] == list(range(1, STEPS + 1))


async def test_processes_that_are_killed_do_not_show(
    make_mesh: MakeMesh, redis_url: str, expected: str
) -> None:
    """A worker and the master are killed with SIGKILL; another master goes on, to the same bits."""
    mesh = make_mesh()
    trainer = make_trainer(mesh)
    dying = start_program(redis_url, "worker", TASKMESH_TEST_FAIL_AT="started:30")
    staying = start_program(redis_url, "worker")
    master = start_program(redis_url, "master", str(STEPS), "17")
    try:
        assert await asyncio.to_thread(master.wait, 60) == -signal.SIGKILL
        async with mesh:
            finished = await trainer.run(steps=STEPS)
            ledger = await trainer.ledger()
        assert await asyncio.to_thread(dying.wait, 60) == -signal.SIGKILL
    finally:
        for process in (dying, staying, master):
            process.kill()
            process.wait()
    assert finished.digest == expected
    # Step 17 was the last of the first master; its successor went back to the checkpoint of step 10.
    assert [entry.step for entry in ledger] == [*range(1, 18), *range(11, STEPS + 1)]
    assert finished.version == 17 + STEPS - 10


async def test_going_on_later_is_the_same_as_not_stopping(make_mesh: MakeMesh, expected: str) -> None:
    for steps in (1, 13):
        assert (await train(make_mesh(), steps=steps)).step == steps
    finished = await train(make_mesh(), steps=STEPS)
    assert finished.digest == expected
    assert (await train(make_mesh(), steps=STEPS)).version == finished.version, "there was nothing left to do"


async def test_it_is_what_one_process_would_have_computed(mesh: Mesh) -> None:
    """Uneven shards, weighted as they should be: equal to plain torch up to the order of the additions."""

    def plain() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    trainer = make_trainer(
        mesh,
        model=plain,
        schedule=None,
        data=Digits(103),
        batch_size=50,
        shards=7,
        compression=NoCompression(),
    )
    async with workers(mesh, 2):
        await trainer.run(steps=6)
        trained = await trainer.load()
        model = await trainer.load(0)
    optimizer = adam(model.parameters())
    for batch in range(6):
        optimizer.zero_grad()
        loss(model, Digits().fetch(await trainer.indices(batch))).mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for one, other in zip(trained.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


async def test_batch_norm_has_one_policy_and_evaluation_matches_one_process(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, model=build_with_norm)
    async with workers(mesh, 2):
        finished = await trainer.run(steps=20)
        outputs = await trainer.predict(IMAGES[SAMPLES:], task_rows=50)
        model = await trainer.load()
    assert int(model.get_buffer("1.num_batches_tracked")) == 20
    with torch.inference_mode():
        torch.testing.assert_close(outputs, model.eval()(IMAGES[SAMPLES:]))
    assert finished.loss < 1.0


async def test_evaluation_beside_a_run_under_way(mesh: Mesh) -> None:
    trainer = make_trainer(mesh, model=build_wide, schedule=None)
    shares: list[float] = []
    async with workers(mesh, 2):
        running = asyncio.create_task(trainer.run(steps=60))
        await wait_until(trainer.status)
        while not running.done():
            shares.append(await trainer.evaluate(IMAGES[SAMPLES:], LABELS[SAMPLES:]))
        await running
    assert len(shares) > 3
    assert shares[-1] > shares[0]


async def test_an_older_version_is_made_current_as_a_new_one(mesh: Mesh) -> None:
    recorder = Recorder()
    mesh.observers.add(recorder)
    trainer = make_trainer(mesh, checkpoint=Every(steps=10, keep=4))
    async with workers(mesh, 2):
        finished = await trainer.run(steps=30)
        new = await trainer.rollback(to=20)
        assert new == 31
        status = await trainer.status()
        assert status is not None
        assert (status.version, status.step) == (31, 20)
        restored, old = FlatModel(await trainer.load()), FlatModel(await trainer.load(20))
        assert torch.equal(restored.values, old.values)
        again = await trainer.run(steps=30)
    assert again.digest == finished.digest, "the same ten steps lead to the same bits"
    assert again.version == 41
    assert [(event.version, event.restored) for event in recorder.of(RolledBack)] == [(31, 20)]


async def test_a_run_under_way_is_rolled_back_between_two_steps(mesh: Mesh) -> None:
    trainer = make_trainer(mesh)
    rollbacks: list[asyncio.Task[int]] = []

    def on_commit(committed: Committed) -> None:
        if committed.version == 15:
            rollbacks.append(asyncio.create_task(trainer.rollback(to=10)))

    async with workers(mesh, 1):
        finished = await trainer.run(steps=20, on_commit=on_commit)
    reached = await rollbacks[0]
    assert 16 <= reached <= 17
    assert finished.version == reached + 10


async def test_large_gradients_leave_nothing_behind(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    """Gradients in several chunks, on a server of their own; what is left is the checkpoints alone."""
    with RedisServer() as bulk:
        mesh = make_mesh(bulk_url=bulk.url)
        trainer = make_trainer(
            mesh,
            model=lambda: nn.Sequential(nn.Linear(64, 20_000), nn.ReLU(), nn.Linear(20_000, 10)),
            batch_size=16,
            shards=2,
            checkpoint=Every(steps=2, keep=1),
        )
        async with workers(mesh, 1), mesh.worker(ONE) as dying:
            fail_at(dying, "finished", 2)  # its gradient was uploaded, and another worker's was used
            finished = await trainer.run(steps=3)
            versions = await trainer.versions()
        keys = RunKeys("test", "digits")
        assert [version.version for version in versions] == [finished.version]
        wanted = {*versions[0].keys(keys), keys.lease, keys.current, keys.history, keys.ledger}
        lasting = {key for key in plain.keys("*run:*") if plain.ttl(key) == -1}
        assert lasting == wanted
        assert len(versions[0].keys(keys)) > 16, "parameters and moments, a mebibyte a chunk"
        assert bulk.command("KEYS", "*") == []


async def test_the_bulk_server_may_lose_everything(make_mesh: MakeMesh, expected: str) -> None:
    with RedisServer() as bulk:
        mesh = make_mesh(bulk_url=bulk.url)
        trainer = make_trainer(mesh)

        def on_commit(committed: Committed) -> None:
            if committed.step % 5 == 2:
                bulk.command("FLUSHALL")

        async with workers(mesh, 2):
            finished = await trainer.run(steps=STEPS, on_commit=on_commit)
    assert finished.digest == expected


async def test_the_server_may_be_killed(expected: str) -> None:
    with RedisServer(aof=True) as server:
        restarts: list[asyncio.Task[None]] = []

        async def restart() -> None:
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)

        def on_commit(committed: Committed) -> None:
            if committed.step in (8, 16):
                restarts.append(asyncio.create_task(restart()))

        mesh = Mesh("test", settings=settings_for_tests(server.url))
        trainer = make_trainer(mesh)
        async with workers(mesh, 2):
            finished = await trainer.run(steps=STEPS, on_commit=on_commit)
            await asyncio.gather(*restarts)
            ledger = await trainer.ledger()
    assert finished.digest == expected
    assert [entry.step for entry in ledger] == list(range(1, STEPS + 1))


async def test_a_cluster_comes_to_the_same_bits(make_mesh: MakeMesh) -> None:
    """Versions of several chunks, spread over the nodes."""
    changes: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(64, 8000), nn.ReLU(), nn.Linear(8000, 10)),
        "batch_size": 32,
    }
    alone = await train(make_mesh(), steps=12, **changes)
    with RedisCluster() as cluster:
        mesh = Mesh("test", settings=settings_for_tests(cluster.url))
        assert (await train(mesh, steps=12, **changes)).digest == alone.digest


async def test_it_waits_for_workers_and_says_so(
    mesh: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    monkeypatch.setattr("taskmesh.training.master.collect.PATIENCE", 0.1)
    trainer = make_trainer(mesh)
    running = asyncio.create_task(trainer.run(steps=2))
    await wait_until(lambda: "no worker serves queue 'digits'" in caplog.text)
    async with workers(mesh, 1):
        assert (await running).step == 2


async def test_a_run_is_not_resumed_with_other_data_or_seed(make_mesh: MakeMesh) -> None:
    await train(make_mesh(), steps=1)
    for changes, match in (
        ({"seed": 1}, "seed"),
        ({"data": Digits(99)}, "samples"),
        ({"batch_size": 7}, "batch_size"),
    ):
        with pytest.raises(TrainingError, match=match):
            await train(make_mesh(), steps=2, **changes)


async def test_one_master_at_a_time(make_mesh: MakeMesh, expected: str) -> None:
    """A second master waits; when the first ends, it finds the run done."""
    first, second = make_mesh(), make_mesh()
    one, other = make_trainer(first), make_trainer(second)
    async with workers(first, 2), second:
        results = await asyncio.gather(one.run(steps=STEPS), other.run(steps=STEPS))
    assert {result.digest for result in results} == {expected}
    assert {result.version for result in results} == {STEPS}


def test_a_trainer_is_named_once(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    trainer: Trainer = make_trainer(mesh)
    assert repr(trainer) == "<Trainer of run 'digits'>"
    with pytest.raises(Exception, match=r"digits\.gradient"):
        make_trainer(mesh)
    assert isinstance(build(), nn.Module)
