"""Tasks of which a worker takes few at once, so that others have theirs."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from taskmesh import ConfigurationError, Context
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh


async def test_a_worker_takes_no_more_than_it_may_have_in_hand(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    started: Counter[str] = Counter()
    go_on = asyncio.Event()

    @mesh.task(in_hand=2)
    async def wait(ctx: Context) -> str:
        started[ctx.worker] += 1
        await go_on.wait()
        return ctx.worker

    @mesh.task(queue="other")
    async def at_once() -> int:
        return 1

    async with mesh.worker() as first:
        handles = [await wait.submit() for _ in range(9)]
        await wait_until(lambda: started.total() == 2)
        others = [await at_once.submit() for _ in range(20)]
        assert sum(await asyncio.gather(*(handle.result(5) for handle in others))) == 20, "other queues go on"
        assert started == {first.worker.decode(): 2}
        async with mesh.worker() as second:
            await wait_until(lambda: started.total() == 4)
            assert set(started.values()) == {2}
            go_on.set()
            done = Counter([await handle.result(5) for handle in handles])
    assert done == started
    assert set(done) == {first.worker.decode(), second.worker.decode()}


async def test_what_makes_no_sense_is_refused(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="in_hand is 0; it must be at least 1"):
        make_mesh().task(in_hand=0)
