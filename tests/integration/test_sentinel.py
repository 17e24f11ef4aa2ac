"""A primary that is lost under sentinels: killed, or frozen and back again.

A ledger outside Redis says what was executed; the handles say how it ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from taskmesh.testing import RedisSentinel, RedisServer, wait_until
from tests.integration.failover_support import QUEUES, Application

_numbers = itertools.count()
FROM_CLIENTS = (
    "cmdstat_evalsha",
    "cmdstat_eval",
    "cmdstat_xreadgroup",
)  # never from a primary to its replica


@pytest.fixture(scope="module")
def shared(request: pytest.FixtureRequest) -> Iterator[RedisSentinel]:
    try:
        made = RedisSentinel(kind=request.param, down_after_ms=2000)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with made:
        yield made


@pytest.fixture
def servers(shared: RedisSentinel) -> RedisSentinel:
    """A primary, two replicas and three sentinels, healthy, whatever the test before did to them."""
    shared.wait_until_healthy()
    return shared


@pytest.fixture
def name() -> str:
    return f"sentinel-{next(_numbers)}"


def writes_of_clients(node: RedisServer) -> dict[str, int]:
    """How often clients tried to change something there since it was started."""
    told = node.information("commandstats")
    return {command: int(told[command]["calls"]) for command in FROM_CLIENTS if command in told}


async def run_something(app: Application) -> None:
    """Have tasks running on every queue, longer than it takes to lose a server, and others waiting for their time."""
    for n, seconds in enumerate((1.5, 2.0, 3.0)):
        for queue in QUEUES:
            await app.submit(queue, n, seconds)
    await wait_until(lambda: app.runs.total() == 9)
    for queue in QUEUES:
        await app.submit(queue, 3, delay=1.5)


async def submit_steadily(app: Application, first: int, count: int) -> None:
    for n in range(first, first + count):
        for queue in QUEUES:
            await app.submit(queue, n)
        await asyncio.sleep(0.005)


@pytest.mark.parametrize("shared", ["redis"], indirect=True)
async def test_a_killed_primary_costs_nothing_that_was_replicated(servers: RedisSentinel, name: str) -> None:
    async with Application(servers.url, name) as app:
        await run_something(app)
        lost = servers.primary
        lost.wait_for_replicas(2)
        lost.kill()
        took = await app.seconds_to_submit("red", 4)
        print(f"first submit {took:.2f} s after the kill")
        await app.await_all()
        assert app.runs == Counter(dict.fromkeys(app.accepted, 1))

        failovers = servers.failovers
        # The old primary comes back, takes itself for one for a while, and is left alone.
        servers.restart(lost)
        returning = asyncio.create_task(asyncio.to_thread(servers.wait_until_healthy))
        n = 5
        while not returning.done():
            await submit_steadily(app, n, 10)
            n += 10
        await returning
        assert servers.failovers == failovers, (
            "another failover, which nobody caused: this machine is too slow"
        )
        await app.await_all()
        assert app.runs == Counter(dict.fromkeys(app.accepted, 1))
        assert await app.unsettled() == 0
        assert servers.primary is not lost
        assert writes_of_clients(lost) == {}


@pytest.mark.parametrize("shared", ["valkey"], indirect=True)
async def test_a_frozen_primary_that_comes_back_settles_nothing_again(
    servers: RedisSentinel, name: str
) -> None:
    async with (
        Application(servers.url, name) as app,
        Application(servers.url, f"{name}-sleeper", workers=0) as sleeper,
        Application(servers.url, f"{name}-sleeper") as awake,
    ):
        await run_something(app)
        await sleeper.submit("red", 0)
        await sleeper.await_all()
        lost = servers.primary
        lost.wait_for_replicas(2)
        lost.pause()
        took = await app.seconds_to_submit("red", 4)
        print(f"first submit {took:.2f} s after the freeze")
        servers.resume()
        await submit_steadily(app, 5, 100)
        await app.await_all()
        # Until it is demoted, a worker that has not heard of the failover may be given its own history once more:
        # that runs again, and counts for nothing.
        assert app.runs.keys() == app.accepted.keys()
        await asyncio.to_thread(servers.wait_until_healthy)
        assert servers.primary is not lost
        failovers = servers.failovers

        # Whoever slept through all that still knows the old address: nothing of what it says is taken there.
        before = writes_of_clients(lost)
        await submit_steadily(app, 200, 20)
        await sleeper.submit("red", 1)
        assert servers.failovers == failovers, (
            "another failover, which nobody caused: this machine is too slow"
        )
        await app.await_all()
        await sleeper.await_all()
        assert all(app.runs[queue, n] == 1 for queue, n in app.accepted if n >= 200)
        assert awake.runs == Counter(dict.fromkeys(sleeper.accepted, 1))
        assert await app.unsettled() == 0
        assert writes_of_clients(lost) == before
