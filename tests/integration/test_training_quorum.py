"""Steps that are taken without their last shards: what is late is owed, and enters a later step once."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from benchmarks.training.audit import account
from taskmesh.errors import ConfigurationError
from taskmesh.events import Committed, ShardsLate
from taskmesh.tasks import Call, Next
from taskmesh.training import Finished, LowRank, Median, NoCompression, Synchronous, TopK, Trainer
from tests.conftest import MakeMesh
from tests.integration.training_support import ONE, Digits, Recorder, build_with_norm, make_trainer

SAMPLES, SHARES = 300, 4
QUORUM: dict[str, Any] = {
    "data": Digits(SAMPLES),
    "batch_size": 64,
    "shards": SHARES,
    "deterministic": False,
    "mode": Synchronous(quorum=0.75),
}


async def never(call: Call, call_next: Next) -> Any:
    """A worker that has a shard and does not begin with it."""
    await asyncio.Future()


async def audit(trainer: Trainer, finished: Finished) -> dict[str, int]:
    return await account(await trainer.ledger(), finished.version, SAMPLES, SHARES, trainer.indices)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model": build_with_norm, "compression": NoCompression()},
        {"aggregation": Median()},
        {"reduce": "workers"},
    ],
    ids=["int8", "plain, with norm", "median", "reduced by workers"],
)
async def test_a_step_does_not_wait_for_a_worker_that_hangs(
    make_mesh: MakeMesh, changes: dict[str, Any]
) -> None:
    """Two data epochs and a bit: it ends, every sample counts once in each, and the ledger leads to the same bits."""
    recorder = Recorder()
    stuck, mesh = make_mesh(middleware=[never]), make_mesh(observers=[recorder])
    make_trainer(stuck, **QUORUM, **changes)
    trainer = make_trainer(mesh, **QUORUM, **changes)
    async with mesh, contextlib.AsyncExitStack() as stack:
        await stack.enter_async_context(stuck)
        hung = await stack.enter_async_context(stuck.worker(ONE))
        await stack.enter_async_context(mesh.worker(ONE))
        finished = await trainer.run(steps=12)
        ledger = await trainer.ledger()
        late = recorder.of(ShardsLate)
        assert late
        assert late[-1].owed >= len(finished.owed)
        assert any(entry.extra for entry in ledger), "what was late came later"
        assert [event.samples for event in recorder.of(Committed)] == [
            sum(share.samples for share in entry.shares) for entry in ledger
        ]
        assert all(len(entry.owed) <= 1 for entry in ledger), "no more is owed than can be late in one step"
        name = hung.worker.decode()
        assert name not in {share.worker for entry in ledger for share in entry.shares}
        found = await audit(trainer, finished)
        assert (found["committed_twice"], found["never_committed"]) == (0, 0)
        assert bool(found["owed"]) == bool(finished.owed)
        assert all(version.matches for version in await trainer.replay())


async def test_what_is_owed_enters_when_the_run_goes_on(make_mesh: MakeMesh) -> None:
    """Also with another quorum, and after a master that lost its last steps."""
    changes = {**QUORUM, "mode": Synchronous(quorum=2)}
    stuck, mesh = make_mesh(middleware=[never]), make_mesh()
    make_trainer(stuck, **changes)
    trainer = make_trainer(mesh, **changes)
    async with stuck, mesh, stuck.worker(ONE), stuck.worker(ONE), mesh.worker(ONE):
        finished = await trainer.run(steps=3)
        assert 0 < len(finished.owed) <= 2

        def lose(committed: Any) -> None:
            if committed.step == 5:
                raise OSError("lost")

        with pytest.raises(OSError, match="lost"):
            await trainer.run(steps=9, on_commit=lose)
    again = make_mesh()
    trainer = make_trainer(again, **{**changes, "mode": Synchronous()})
    async with again, again.worker(ONE):
        owed = [len(entry.owed) for entry in await trainer.ledger()][2]
        assert owed == len(finished.owed)
        finished = await trainer.run(steps=3 + owed + 1)
        assert finished.owed == ()
        found = await audit(trainer, finished)
        assert (found["committed_twice"], found["never_committed"], found["owed"]) == (0, 0, 0)
        assert all(version.matches for version in await trainer.replay())
        formed = await trainer.form(without=(await trainer.ledger())[-1].shares[0].worker, since=3)
        assert formed.left_out == sum(len(entry.shares) for entry in (await trainer.ledger())[-owed - 1 :])


@pytest.mark.parametrize(
    ("choices", "what"),
    [
        ({"mode": Synchronous(quorum=0.5)}, "a quorum of 4 of 8 shards and deterministic=True"),
        ({"mode": Synchronous(quorum=9), "deterministic": False}, "a quorum of 9 of 8 shards cannot be"),
        ({"mode": Synchronous(quorum=2), "deterministic": False, "aggregation": Median()}, "at least 3"),
        ({"mode": Synchronous(0.8), "deterministic": False, "compression": LowRank()}, "late for ever"),
    ],
)
def test_what_a_quorum_does_not_go_with(make_mesh: MakeMesh, choices: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigurationError, match=what):
        make_trainer(make_mesh(), **choices)


def test_a_quorum_of_all_is_none(make_mesh: MakeMesh) -> None:
    make_trainer(make_mesh(), mode=Synchronous(quorum=8), compression=TopK(0.1))


@pytest.mark.parametrize("quorum", [0, 0.0, -1, 1.5])
def test_quorums_that_cannot_be_are_refused(quorum: float) -> None:
    with pytest.raises(ConfigurationError, match="quorum is a share"):
        Synchronous(quorum=quorum)
