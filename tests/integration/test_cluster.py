"""A cluster that loses nodes, has nodes that hang, and moves slots under load.

A ledger outside Redis says what was executed; the handles say how it ended.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from taskmesh import Cancelled, TaskCancelled
from taskmesh.testing import RedisCluster, SlotMigration, wait_until
from taskmesh.testing.servers import Kind, find_binary
from tests.conftest import LIVENESS_TTL
from tests.integration.failover_support import QUEUES, Application

OPTIONS = {"cluster-require-full-coverage": "no"}  # else all nodes refuse while one is missing
_numbers = itertools.count()


@pytest.fixture(scope="module")
def clusters() -> Iterator[Callable[[Kind], RedisCluster]]:
    """Clusters of six nodes, formed when one of that kind is first wanted."""
    made: dict[Kind, RedisCluster] = {}
    with ExitStack() as stack:

        def of_kind(kind: Kind) -> RedisCluster:
            if kind not in made:
                if find_binary(kind) is None:
                    pytest.skip(f"no {kind}-server here")
                made[kind] = stack.enter_context(
                    RedisCluster(replicas=3, kind=kind, node_timeout_ms=1000, options=OPTIONS)
                )
            return made[kind]

        yield of_kind


@pytest.fixture(params=["redis", "valkey"])
def cluster(request: pytest.FixtureRequest, clusters: Callable[[Kind], RedisCluster]) -> RedisCluster:
    """A healthy one, whatever the test before did to it."""
    cluster = clusters(request.param)
    cluster.wait_until_healthy()
    return cluster


@pytest.fixture
def name() -> str:
    return f"cluster-{next(_numbers)}"


def tag_of(name: str, queue: str) -> bytes:
    return f"{name}:{queue}:0".encode()


async def test_a_killed_primary_with_a_replica_costs_nothing_that_was_replicated(
    cluster: RedisCluster, name: str
) -> None:
    tag = tag_of(name, "red")
    async with Application(cluster.url, name) as app:
        for n, seconds in enumerate((1.5, 2.0, 3.0)):
            for queue in QUEUES:
                await app.submit(queue, n, seconds)
        await wait_until(lambda: app.runs.total() == 9)
        for queue in QUEUES:
            await app.submit(queue, 3, delay=1.5)
        cluster.primary_of(tag).wait_for_replicas(1, b"{%s}" % tag)
        lost = cluster.kill_primary_of(tag)
        took = await app.seconds_to_submit("red", 4)
        print(f"first submit {took:.2f} s after the kill")
        await app.await_all()
        assert set(app.runs.values()) == {1}
        cluster.restart(lost)
        await asyncio.to_thread(cluster.wait_until_healthy)
        await app.submit("red", 5)
        await app.await_all()
        assert await app.unsettled() == 0


def are_apart(cluster: RedisCluster, name: str) -> bool:
    """The red queue shares its node with no other."""
    red, *others = (cluster.primary_of(tag_of(name, queue)) for queue in QUEUES)
    return red not in others


@pytest.mark.parametrize("cluster", ["redis"], indirect=True)
async def test_a_node_that_hangs_costs_no_lease_on_the_others(cluster: RedisCluster) -> None:
    ttl = 0.6
    name = next(name for name in (f"hang-{n}" for n in itertools.count()) if are_apart(cluster, name))
    hanging = cluster.primary_of(tag_of(name, "red"))
    async with Application(cluster.url, name, ttl=ttl) as app:
        for queue in QUEUES:
            await app.submit(queue, 0, 4 * ttl)
        await wait_until(lambda: app.runs.total() == 3)
        hanging.wait_for_replicas(1, b"{%s}" % tag_of(name, "red"))
        hanging.pause()
        try:
            for n in range(1, 10):
                for queue in ("green", "blue"):
                    assert await app.seconds_to_submit(queue, n) < 0.5, (
                        "it waited for a node that is not its own"
                    )
                await asyncio.sleep(3 * ttl / 10)
        finally:
            hanging.resume()
        await app.await_all()
        assert set(app.runs.values()) == {1}


class Load:
    """Submits, delays and cancels on one queue until it is told to stop."""

    def __init__(self, app: Application, queue: str) -> None:
        self._app = app
        self._queue = queue
        self._going_on = True
        self.cancelled: dict[int, Cancelled] = {}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._submit())
            group.create_task(self._cancel())

    async def _submit(self) -> None:
        for n in itertools.count(1000):
            if not self._going_on:
                return
            await self._app.submit(self._queue, n, 0.005, delay=0.05 if n % 3 == 0 else None)
            await asyncio.sleep(0.002)

    async def _cancel(self) -> None:
        for n in itertools.count(1_000_000):
            if not self._going_on:
                return
            handle = await self._app.submit(self._queue, n, delay=600.0)
            del self._app.accepted[self._queue, n]
            self.cancelled[n] = await handle.cancel()
            with pytest.raises(TaskCancelled):
                await handle.result(timeout=20)

    def stop(self) -> None:
        self._going_on = False


async def in_steps(migration: SlotMigration, first: bytes) -> None:
    """Move the slot with stops longer than a lease: nothing moved yet, ``first`` moved, all moved but the end."""
    stop = LIVENESS_TTL * 1.2
    migration.begin()
    await asyncio.sleep(stop / 4)
    migration.move([first])
    await asyncio.sleep(stop)
    for _ in iter(lambda: migration.move(count=3), 0):
        await asyncio.sleep(0.01)
    await asyncio.sleep(stop / 4)
    migration.finish()


@pytest.mark.parametrize("cluster", ["redis"], indirect=True)
async def test_a_planned_failover_under_load_loses_and_doubles_nothing(
    cluster: RedisCluster, name: str
) -> None:
    async with Application(cluster.url, name) as app:
        load = Load(app, "red")
        loading = asyncio.create_task(load.run())
        await wait_until(lambda: len(app.accepted) > 50)
        await asyncio.to_thread(cluster.hand_over, tag_of(name, "red"))
        accepted = len(app.accepted)
        await wait_until(lambda: len(app.accepted) > accepted + 50)
        load.stop()
        await loading
        await app.await_all()
        assert app.runs == Counter(dict.fromkeys(app.accepted, 1))
        await wait_until(lambda: is_settled(app))


@pytest.mark.parametrize(
    ("cluster", "first"),
    [("redis", "tasks:normal"), ("valkey", "workers")],
    indirect=["cluster"],
)
async def test_a_slot_that_moves_under_load_loses_and_doubles_nothing(
    cluster: RedisCluster, name: str, first: str
) -> None:
    tag = tag_of(name, "red")
    slot = cluster.slot_of(tag)
    source = cluster.node_of(slot)
    target = next(node for node in cluster.primaries() if node is not source)
    async with Application(cluster.url, name) as app:
        load = Load(app, "red")
        await app.submit("red", 0, 3.0)  # runs all the while
        await app.submit("red", 1, delay=1.0)  # due half-way
        loading = asyncio.create_task(load.run())
        await wait_until(lambda: len(app.accepted) > 50)
        await in_steps(cluster.migration(slot, target), b"taskmesh:{%s}:%s" % (tag, first.encode()))
        accepted = len(app.accepted)
        await wait_until(lambda: len(app.accepted) > accepted + 50)
        load.stop()
        await loading
        await app.await_all()
        assert app.runs == Counter(dict.fromkeys(app.accepted, 1))
        assert set(load.cancelled.values()) <= {Cancelled.CANCELLED}
        await wait_until(lambda: is_settled(app))
        assert cluster.node_of(slot) is target


async def is_settled(app: Application) -> bool:
    return await app.unsettled() == 0
