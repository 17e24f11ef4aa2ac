"""A compressed downlink: the workers step by what the master steps by, and all have the same bits."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import redis
from torch import Tensor

from taskmesh import Mesh
from taskmesh.checkpoints.manifest import Part
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import ConfigurationError
from taskmesh.events import Checkpointed, Committed
from taskmesh.training import DGC, Compression, Every, Finished, Int8, LocalSteps, LowRank, TopK, Trainer
from taskmesh.training.host import HostMemory
from taskmesh.training.worker.follower import Follower
from tests.conftest import MakeMesh
from tests.integration.training_support import (
    IMAGES,
    ONE,
    Recorder,
    build_broad,
    build_with_norm,
    make_trainer,
)


async def train(mesh: Mesh, steps: int, workers: int, **changes: Any) -> tuple[Finished, Trainer]:
    trainer = make_trainer(mesh, **changes)
    async with mesh, contextlib.AsyncExitStack() as stack:
        for _ in range(workers):
            await stack.enter_async_context(mesh.worker(ONE))
        return await trainer.run(steps=steps), trainer


@pytest.mark.parametrize("downlink", [Int8(), TopK(0.05), LowRank(2)], ids=lambda each: each.name)
async def test_the_bits_are_the_same_with_any_number_of_workers_and_it_learns(
    make_mesh: MakeMesh, downlink: Compression
) -> None:
    recorder = Recorder()
    settings: dict[str, Any] = {"downlink": downlink, "model": build_with_norm}
    alone, _ = await train(make_mesh("alone", observers=[recorder]), 30, 1, **settings)
    together, _ = await train(make_mesh("three"), 30, 3, **settings)
    assert together.digest == alone.digest
    assert together.loss < 1.5
    steps = recorder.of(Committed)
    parameters = 4 * (64 * 32 + 32 + 32 + 32 + 32 * 10 + 10)
    assert 0 < steps[-1].downlink_bytes < parameters / 2


async def test_a_worker_that_joins_late_begins_at_a_checkpoint_and_steps_on(make_mesh: MakeMesh) -> None:
    whole, _ = await train(make_mesh("whole"), 30, 1, downlink=Int8())
    mesh = make_mesh("late", liveness_ttl=1.0)
    trainer = make_trainer(mesh, downlink=Int8())
    late = asyncio.Event()
    async with mesh, mesh.worker(ONE) as first:

        def on_commit(committed: Committed) -> None:
            if committed.step == 14:  # four after the checkpoint
                first.abandon()
                late.set()

        running = asyncio.create_task(trainer.run(steps=30, on_commit=on_commit))
        await late.wait()
        async with mesh.worker(ONE):
            finished = await running
    assert finished.digest == whole.digest


async def test_a_rollback_and_a_resumed_run_go_on_from_what_was_not_sent(make_mesh: MakeMesh) -> None:
    settings: dict[str, Any] = {"downlink": TopK(0.05)}
    whole, _ = await train(make_mesh("whole"), 40, 1, **settings)
    mesh = make_mesh("back")
    trainer = make_trainer(mesh, **settings)
    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=15)
        await trainer.run(steps=30)
        kept = {manifest.step: manifest.version for manifest in await trainer.versions()}
        await trainer.rollback(to=kept[20])
        finished = await trainer.run(steps=40)
        replayed = await trainer.replay()
    assert finished.digest == whole.digest
    assert replayed
    assert all(version.matches for version in replayed)


async def test_a_step_that_the_server_has_lost_is_made_up_for_by_a_checkpoint(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    whole, _ = await train(make_mesh("whole"), 12, 1, downlink=Int8())
    mesh = make_mesh("lost")
    trainer = make_trainer(mesh, downlink=Int8(), checkpoint=Every(steps=1000))
    lost: list[bytes] = []

    def on_commit(committed: Committed) -> None:
        if committed.step == 7:
            lost.extend(plain.keys(f"*{mesh.name}*transient*"))
            plain.delete(*lost)

    async with mesh, mesh.worker(ONE):
        finished = await trainer.run(steps=12, on_commit=on_commit)
        assert lost
        assert finished.digest == whole.digest
        assert not plain.keys(f"*{mesh.name}*transient*"), "nothing is left behind"


async def test_a_worker_goes_on_with_another_run_of_that_name(make_mesh: MakeMesh) -> None:
    """Its versions begin at 0 again, below those that the worker has seen."""
    mesh = make_mesh(observers=[recorder := Recorder()])
    trainer = make_trainer(mesh, downlink=Int8(), checkpoint=Every(steps=1000))
    async with mesh, mesh.worker(ONE):
        first = await trainer.run(steps=8)
        await trainer.delete()
        kept = len(recorder.of(Checkpointed))
        assert (await trainer.run(steps=8)).digest == first.digest
    assert len(recorder.of(Checkpointed)) - kept == 2  # the first version and the last


async def test_the_model_can_be_asked_while_only_steps_travel(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    trainer = make_trainer(mesh, downlink=Int8())
    answers: list[asyncio.Task[Tensor]] = []

    def on_commit(committed: Committed) -> None:
        if committed.step == 13:
            answers.append(asyncio.create_task(trainer.predict(IMAGES[:10])))

    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=20, on_commit=on_commit)
        assert (await answers[0]).shape == (10, 10)


class Counting(VersionStore):
    """Counts the steps that are fetched."""

    fetched = 0

    async def load(self, part: Part, into: memoryview | None = None) -> memoryview:
        self.fetched += not part.kept
        return await super().load(part, into)


async def test_the_workers_of_a_machine_share_one_fetch_of_a_step(make_mesh: MakeMesh) -> None:
    mesh = make_mesh("machine")
    trainer = make_trainer(mesh, downlink=Int8(), model=build_broad, batch_size=16, shards=2)
    led: list[asyncio.Task[list[bytes]]] = []

    async def follow() -> list[bytes]:
        """Two processes of one machine, neither of which has computed a shard."""
        client = mesh.client
        store = Counting(client.caller, client.bulk, trainer.store.keys)
        manifest = await store.current()
        assert manifest is not None
        part, update = manifest.parts["parameters"], manifest.parts["update"]
        reached = [memoryview(bytearray(part.size_bytes)) for _ in range(2)]
        followers = [Follower(trainer._new_learner, HostMemory(mesh.name)) for _ in reached]
        await asyncio.gather(
            *(each.bring(store, part, update, into) for each, into in zip(followers, reached, strict=True))
        )
        assert store.fetched == manifest.version
        return [bytes(into) for into in reached]

    def on_commit(committed: Committed) -> None:
        if committed.step == 3:  # as many steps as a machine holds at once
            led.append(asyncio.create_task(follow()))

    async with mesh, mesh.worker(ONE):
        await trainer.run(steps=6, on_commit=on_commit)
        one, other = await led[0]
    assert one == other


async def test_local_steps_go_with_it(make_mesh: MakeMesh) -> None:
    settings: dict[str, Any] = {"mode": LocalSteps(10), "downlink": Int8(), "shards": 4}
    alone, _ = await train(make_mesh("alone"), 4, 1, **settings)
    together, _ = await train(make_mesh("two"), 4, 2, **settings)
    assert together.digest == alone.digest


def test_a_method_with_momentum_of_its_own_is_refused(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="the mean of all"):
        make_trainer(make_mesh(), downlink=DGC(0.1, momentum=0.0))
