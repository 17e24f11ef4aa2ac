"""The state of a Mesh at one moment, from a real server."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable

import pytest
import redis

from taskmesh import BrokerUnavailable, ConfigurationError, Mesh, MeshSettings, Priority
from taskmesh.monitoring import METRICS, RunStatus, metrics, snapshot
from taskmesh.testing import RedisCluster, RedisServer, wait_until


async def noop(number: int) -> int:
    return number


async def wait(seconds: float) -> None:
    await asyncio.sleep(seconds)


async def fail(number: int) -> None:
    raise ValueError(str(number))


async def test_an_empty_mesh(mesh: Mesh) -> None:
    mesh.task(noop)
    seen = await snapshot(mesh)
    (queue,) = seen.queues
    assert (queue.name, queue.waiting, queue.pending, queue.delayed, queue.dead, queue.parked) == (
        *("default", 0, 0, 0, 0, 0),
    )
    assert queue.oldest_age is None
    assert seen.workers == () and seen.runs == ()
    (server,) = seen.servers
    assert server.role == "main"
    assert server.version.startswith(("Redis 7", "Redis 8", "Valkey"))
    assert server.memory_used_bytes > 0 and server.memory_limit_bytes == 0 and server.clients >= 1


async def test_what_waits(mesh: Mesh) -> None:
    task = mesh.task(noop)
    await task.submit_many(range(3))
    await task.options(priority=Priority.HIGH).submit(1)
    await task.submit_in(60, 2)
    await asyncio.sleep(0.05)
    (queue,) = (await snapshot(mesh)).queues
    assert {lane.lane: lane.waiting for lane in queue.lanes} == {"high": 1, "normal": 3, "low": 0}
    assert (queue.pending, queue.delayed) == (0, 1)
    assert queue.oldest_age is not None and 0.05 <= queue.oldest_age < 10


async def test_what_workers_hold(mesh: Mesh) -> None:
    task = mesh.task(queue="slow")(wait)
    mesh.task(noop)
    async with mesh.worker() as worker:
        await task.submit_many([30.0] * 4)

        async def running() -> bool:
            return (await snapshot(mesh)).queues[0].pending == 4

        await wait_until(running)
        seen = await snapshot(mesh)
        (listed,) = seen.workers
        assert (listed.name, listed.holds, listed.is_alive) == (worker.worker.decode(), 4, True)
        assert listed.queues == ("slow", "default")
        assert listed.last_seen_age < 1.0
        assert seen.queues[0].waiting == 0 and seen.queues[0].oldest_age is None
        await worker.stop(timeout=0.0)
        seen = await snapshot(mesh)
        # Handed back: it waits again, and nobody holds it.
        assert seen.workers == ()
        assert (seen.queues[0].waiting, seen.queues[0].pending) == (4, 0)
        assert seen.queues[0].oldest_age is not None


async def test_suspects_wait_too(mesh: Mesh, plain: redis.Redis) -> None:
    task = mesh.task(noop)
    async with mesh.worker():
        pass
    await task.submit(1)
    lane = f"taskmesh:{{{mesh.name}:default:0}}:tasks:normal"
    plain.xgroup_create(lane, "workers", "0", mkstream=True)
    plain.xreadgroup("workers", "suspects", {lane: ">"})
    (queue,) = (await snapshot(mesh)).queues
    assert (queue.waiting, queue.pending) == (1, 0)
    assert queue.oldest_age is not None


async def test_a_worker_that_died_is_shown_as_lost(mesh: Mesh, plain: redis.Redis) -> None:
    mesh.task(noop)
    plain.zadd("taskmesh:{test:default:0}:workers", {"gone": 1000})
    (worker,) = (await snapshot(mesh)).workers
    assert (worker.name, worker.is_alive, worker.holds) == ("gone", False, 0)


async def test_dead_and_parked(mesh: Mesh) -> None:
    task = mesh.task(fail)
    async with mesh.worker():
        await task.submit_many(range(2))

        async def dead() -> int:
            return (await snapshot(mesh)).queues[0].dead

        await wait_until(lambda: _equals(dead(), 2))
        other = Mesh(mesh.name, settings=mesh.settings)
        unknown = other.task(noop)
        async with other:
            await unknown.submit(1)

            async def parked() -> int:
                return (await snapshot(mesh)).queues[0].parked

            await wait_until(lambda: _equals(parked(), 1))


async def _equals(awaited: Awaitable[int], wanted: int) -> bool:
    return await awaited == wanted


async def test_as_gauges(mesh: Mesh) -> None:
    await mesh.task(noop).submit_many(range(5))

    class Run:
        async def status(self) -> RunStatus | None:
            return RunStatus("digits", 7, 42, 0.5)

    class NotStarted:
        async def status(self) -> RunStatus | None:
            return None

    mesh.runs["digits"] = Run()
    mesh.runs["later"] = NotStarted()
    seen = await snapshot(mesh)
    assert [run.name for run in seen.runs] == ["digits"]
    gauges = seen.gauges()
    assert gauges[metrics.WAITING]["default", "normal"] == 5
    assert gauges[metrics.LOSS] == {("digits",): 0.5}
    assert set(gauges) <= set(METRICS)
    for name, samples in gauges.items():
        assert all(len(labels) == len(METRICS[name].labels) for labels in samples), name


async def test_looking_leaves_nothing_behind(mesh: Mesh, plain: redis.Redis) -> None:
    mesh.task(noop)
    await snapshot(mesh)
    assert plain.dbsize() == 0


async def test_neither_keys_nor_scan(mesh: Mesh, plain: redis.Redis) -> None:
    mesh.task(noop)
    plain.config_resetstat()
    await snapshot(mesh)
    used = {name.partition("_")[2].partition("|")[0] for name in plain.info("commandstats")}
    assert not {"keys", "scan"} & used


async def test_outside_the_mesh() -> None:
    with pytest.raises(ConfigurationError):
        await snapshot(Mesh("test", "redis://127.0.0.1:1"))


async def test_a_server_that_went_away_is_told_and_found_again() -> None:
    with RedisServer() as server:
        mesh = Mesh("test", settings=MeshSettings(url=server.url))
        mesh.task(noop)
        async with mesh:
            await snapshot(mesh)
            server.kill()
            with pytest.raises(BrokerUnavailable):
                await snapshot(mesh)
            server.start()
            assert len((await snapshot(mesh)).queues) == 1


async def test_a_bulk_server_of_its_own(redis_url: str) -> None:
    with RedisServer() as bulk:
        mesh = Mesh("test", settings=MeshSettings(url=redis_url, bulk_url=bulk.url))
        mesh.task(noop)
        async with mesh:
            seen = await snapshot(mesh)
        assert [server.role for server in seen.servers] == ["main", "bulk"]


async def test_a_cluster() -> None:
    with RedisCluster() as cluster:
        mesh = Mesh("test", settings=MeshSettings(url=cluster.url))
        tasks = [mesh.task(name=f"noop{number}", queue=f"queue{number}")(noop) for number in range(8)]
        async with mesh:
            for number, task in enumerate(tasks):
                await task.submit_many(range(number))
            seen = await snapshot(mesh)
        assert [queue.waiting for queue in seen.queues] == list(range(8))
        addresses = {f"127.0.0.1:{node.port}" for node in cluster.nodes}
        assert {server.name for server in seen.servers} <= addresses
        assert len(seen.servers) >= 2


async def test_the_view(mesh: Mesh) -> None:
    console = pytest.importorskip("rich.console")
    from taskmesh.monitoring.terminal import render

    await mesh.task(noop).submit_many(range(5))
    before = await snapshot(mesh)
    async with mesh.worker() as worker:
        screen = console.Console(width=120, record=True, file=io.StringIO())
        screen.print(render(await snapshot(mesh), before))
        text = screen.export_text()
        assert worker.worker.decode() in text
    assert "default" in text and "workers alive" in text
