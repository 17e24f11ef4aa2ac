"""Ranks that torchrun starts act as one worker."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from taskmesh import ConfigurationError, Mesh, TrainingError, WorkerSettings
from taskmesh.cli.main import app
from taskmesh.events import Committed
from taskmesh.testing import RedisServer, wait_until
from taskmesh.training import Execution, Finished, LocalSteps
from taskmesh.training.torchrun import join
from tests.conftest import MakeMesh, settings_for_tests
from tests.integration.cli_support import is_running
from tests.integration.group_app import Ranks, Rows, fsdp, make

ONE = WorkerSettings(concurrency=1)
ROWS = Rows(5).rows


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A server that is not emptied between these tests: the group is in its queues."""
    with RedisServer() as running:
        yield running


@pytest.fixture(scope="module")
def ranks(server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The group that computes what these tests train; at the end its leader is told to stop, and all do."""
    group = Ranks(server.url, tmp_path_factory.mktemp("group") / "log")
    try:
        yield group
        group.signal(0, signal.SIGTERM)
        assert group.process.wait(60) == 0, group.text
    finally:
        group.close()


def mesh_of(server: RedisServer, name: str = "groups") -> Mesh:
    return Mesh(name, settings=settings_for_tests(server.url))


async def train(server: RedisServer, name: str, steps: int) -> tuple[Finished, nn.Module]:
    """With the group alone."""
    trainer = make(mesh_of(server), name)
    async with trainer.mesh:
        finished, model = await trainer.run(steps=steps), await trainer.load()
        outputs = await trainer.predict(ROWS)
    assert_close(outputs, model.eval()(ROWS).detach())
    return finished, model


async def train_alone(server: RedisServer, name: str, steps: int) -> tuple[Finished, nn.Module]:
    """The same run, by a worker that is a single process."""
    trainer = make(mesh_of(server, "alone"), name, group=1, execution=Execution())
    async with trainer.mesh, trainer.mesh.worker(ONE):
        return await trainer.run(steps=steps), await trainer.load()


def assert_close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def assert_alike(one: nn.Module, other: nn.Module) -> None:
    for mine, theirs in zip(one.state_dict().values(), other.state_dict().values(), strict=True):
        assert_close(mine, theirs)


@pytest.mark.parametrize("run", ["branches", "tiny", "fsdp", "ddp"])
async def test_a_group_takes_the_steps_that_one_process_takes(
    server: RedisServer, ranks: Ranks, run: str
) -> None:
    found, model = await train(server, run, 4)
    alone, expected = await train_alone(server, run, 4)
    assert found.loss == pytest.approx(alone.loss, rel=1e-4)
    assert_alike(model, expected)


async def test_buffers_are_averaged_over_the_samples(server: RedisServer, ranks: Ranks) -> None:
    # Of a step whose seven samples are split unevenly: the mean of the parts' means is that of all.
    _, model = await train(server, "norm", 1)
    _, expected = await train_alone(server, "norm", 1)
    buffers, wanted = dict(model.named_buffers()), dict(expected.named_buffers())
    assert_close(buffers["0.running_mean"], wanted["0.running_mean"])
    assert buffers["0.num_batches_tracked"] == 1
    assert not torch.equal(buffers["0.running_var"], torch.ones(64))


async def test_the_bits_are_the_same_again_and_others_than_one_process_has(
    server: RedisServer, ranks: Ranks, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make(mesh_of(server), "chance")
    async with trainer.mesh:
        async with trainer.mesh.worker(ONE) as single:
            await trainer.run(steps=1)
            name = single.worker.decode()
        first = await trainer.run(steps=6)
        kept = await trainer.versions()
        await trainer.rollback(to=next(each.version for each in kept if each.step == 3))
        again = await trainer.run(steps=6)
        workers = {share.worker for entry in await trainer.ledger() for share in entry.shares}
        with pytest.raises(TrainingError, match="groups of 2 ranks: one process gives other bits"):
            await trainer.replay()
    assert again.digest == first.digest
    assert len(workers) == 1 and name not in workers
    assert f"worker {name} gets no shards" in caplog.text
    assert "groups of 2 ranks" in caplog.text


async def test_what_fails_on_one_rank_is_said_and_the_group_goes_on(
    server: RedisServer, ranks: Ranks
) -> None:
    with pytest.raises(TrainingError, match="rank 1 of the group of 2 failed") as caught:
        await train(server, "failing", 1)
    assert "ValueError: a sample that nobody can read" in str(caught.value)
    assert ranks.process.poll() is None


async def test_memory_that_runs_out_on_one_rank_makes_the_parts_of_all_smaller(
    server: RedisServer, ranks: Ranks
) -> None:
    found, model = await train(server, "narrow", 2)
    alone, expected = await train_alone(server, "narrow", 2)
    assert found.loss == pytest.approx(alone.loss, rel=1e-4)
    assert_alike(model, expected)
    assert "out of memory; from now on 3 samples at once" in ranks.text


async def test_a_run_goes_on_without_a_group_that_has_lost_a_rank(tmp_path: Path) -> None:
    with RedisServer() as own:
        group = Ranks(own.url, tmp_path / "log")
        try:
            trainer = make(mesh_of(own), "any")
            async with trainer.mesh, trainer.mesh.worker(ONE) as single:
                await wait_until(lambda: "serves" in group.text, 60.0)
                pids = [group.pid(0), group.pid(1)]

                def kill(committed: Committed) -> None:
                    if committed.step == 3:
                        group.signal(1, signal.SIGKILL)

                finished = await trainer.run(steps=8, on_commit=kill)
                ledger = await trainer.ledger()
                name = single.worker.decode()
            assert finished.step == 8
            assert {share.worker for entry in ledger for share in entry.shares} > {name}
            assert {share.worker for share in ledger[-1].shares} == {name}
            await wait_until(lambda: group.process.poll() is not None, 60.0)
            assert group.process.returncode != 0
            assert not any(map(is_running, pids))
        finally:
            group.close()


async def test_a_group_is_started_by_torchrun_and_has_a_run_to_compute(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="a group is started by torchrun"):
        await join(make(make_mesh(), "any").mesh)
    with pytest.raises(ConfigurationError, match="has no training run"):
        await join(make_mesh())
    ended = CliRunner().invoke(app, ["worker", "x:y", "--group", "--procs", "2"])
    assert "--group and --procs do not go together" in str(ended.exception)


def test_what_does_not_go_with_groups_is_refused_with_the_reason(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="local steps and groups do not go together"):
        make(make_mesh(), "any", mode=LocalSteps(10), group=2)
    with pytest.raises(ConfigurationError, match="precision fp16 and a model that ranks share"):
        make(make_mesh(), "any", execution=Execution(precision="fp16", parallel=fsdp))
    with pytest.raises(ConfigurationError, match="group is 0"):
        make(make_mesh(), "any", group=0)
