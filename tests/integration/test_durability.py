"""What a submit can wait for beyond the primary's word: a real primary with a real replica, of both kinds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import pytest

from taskmesh import BrokerUnavailable, ConfigurationError, Mesh, MeshSettings, ServerTooOld, Task
from taskmesh.broker.scripts import SUBMIT
from taskmesh.errors import NotConfirmed
from taskmesh.settings import Durability
from taskmesh.testing import Proxy, RedisServer, wait_until
from taskmesh.testing.servers.binary import Kind, find_binary
from tests.conftest import LIVENESS_TTL

STREAM = "taskmesh:{durable:default:0}:tasks:normal"
KINDS: list[Kind] = ["redis", "valkey"]
LAG = (
    1  # seconds of silence after which a primary does not count a replica, where min-replicas-to-write is set
)


class Pair(NamedTuple):
    primary: RedisServer
    replica: RedisServer

    def follow(self) -> None:
        self.replica.command("REPLICAOF", "127.0.0.1", self.primary.port)

    async def in_step(self) -> None:
        """Return when the replica confirms what is written now."""

        def confirms() -> bool:
            with self.primary.client() as client:
                client.set("probe", 1, px=1000)
                return client.execute_command("WAIT", 1, 100) == 1

        await wait_until(confirms, what="the replica follows")


def make_server(kind: Kind, aof: bool = True) -> RedisServer:
    if find_binary(kind) is None:
        pytest.skip(f"no {kind}-server here")
    return RedisServer(kind, aof=aof, options={"repl-diskless-sync-delay": "0"})


@pytest.fixture(params=KINDS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """A primary and its replica, in step."""
    with make_server(request.param) as primary, make_server(request.param) as replica:
        made = Pair(primary, replica)
        made.follow()
        await made.in_step()
        yield made


@pytest.fixture
def valkey() -> Iterator[RedisServer]:
    with make_server("valkey") as server:
        yield server


def connect(
    url: str, durability: Durability | None = None, retry_for: float = 5.0, runs: list[int] | None = None
) -> tuple[Mesh, Task[[int], int]]:
    """A Mesh, and a task that notes its runs."""
    settings = MeshSettings(url=url, liveness_ttl=LIVENESS_TTL, durability=durability, retry_for=retry_for)
    mesh = Mesh("durable", settings=settings)

    @mesh.task
    async def double(n: int) -> int:
        if runs is not None:
            runs.append(n)
        return 2 * n

    return mesh, double


async def test_a_submit_returns_when_the_replica_has_the_message(pair: Pair) -> None:
    mesh, double = connect(pair.primary.url, Durability(replicas=1))
    async with mesh:
        handles = [
            await double.submit(1),
            await double.submit_in(60, 2),
            *await double.submit_many(range(1500)),
        ]
        with pair.replica.client() as client:
            assert client.xlen(STREAM) == 1501
            assert client.zcard("taskmesh:{durable:default:0}:delayed") == 1
        async with mesh.worker():
            assert await handles[0].result(timeout=5) == 2
            assert [await handle.result(timeout=5) for handle in handles[2:]] == [2 * n for n in range(1500)]


async def test_large_arguments_are_confirmed_with_their_message(pair: Pair) -> None:
    mesh, _ = connect(pair.primary.url)

    @mesh.task(durability=Durability(replicas=1))
    async def size(data: bytes) -> int:
        return len(data)

    async with mesh:
        handle = await size.submit(bytes(3_000_000))
        with pair.replica.client() as client:
            assert len(client.keys("*:blob:*")) == 3
        async with mesh.worker():
            assert await handle.result(timeout=5) == 3_000_000


async def test_without_the_replica_the_submitter_is_told_and_the_message_runs_once(pair: Pair) -> None:
    runs: list[int] = []
    mesh, double = connect(pair.primary.url, runs=runs)
    durable = double.options(durability=Durability(replicas=1, timeout=0.2))
    async with mesh:
        pair.replica.pause()
        began = time.monotonic()
        with pytest.raises(NotConfirmed, match=r"accepted .* 0 of 1 replicas confirmed within 0.2 s") as told:
            await durable.submit(21)
        assert 0.15 < time.monotonic() - began < 2
        with pytest.raises(NotConfirmed) as told_many:
            await durable.submit_many([1, 2, 3])
        plain = await double.submit(5)  # nobody else waits for the replica
        async with mesh.worker():
            assert await told.value.submitted.result(timeout=5) == 42
            assert [await handle.result(timeout=5) for handle in told_many.value.submitted] == [2, 4, 6]
            assert await plain.result(timeout=5) == 10
            await wait_until(lambda: pair.primary.command("XLEN", STREAM) == 0)
        assert sorted(runs) == [1, 2, 3, 5, 21]
        pair.replica.resume()
        await pair.in_step()
        await durable.submit(1)


async def test_submits_without_a_durability_do_not_wait_for_those_with_one(pair: Pair) -> None:
    mesh, double = connect(pair.primary.url)
    durable = double.options(durability=Durability(replicas=1, timeout=1.5))
    async with mesh:
        pair.replica.pause()
        waiting = asyncio.create_task(durable.submit(1))
        await wait_until(lambda: pair.primary.command("XLEN", STREAM) == 1)
        began = time.monotonic()
        await double.submit(2)
        assert time.monotonic() - began < 1
        assert not waiting.done()
        pair.replica.resume()
        await waiting


async def test_a_batch_whose_reply_was_lost_is_confirmed_on_the_new_connection(pair: Pair) -> None:
    async with Proxy(pair.primary.port) as proxy:
        mesh, double = connect(proxy.url, Durability(replicas=1, timeout=0.3))
        async with mesh:
            await double.submit(1)
            pair.replica.pause()
            proxy.cut_reply_after(SUBMIT.sha)
            with pytest.raises(NotConfirmed):
                await double.submit(2)
            assert proxy.cuts == 1
            assert pair.primary.command("XLEN", STREAM) == 2
            pair.replica.resume()


async def test_the_append_only_file_of_a_valkey_is_waited_for(valkey: RedisServer) -> None:
    mesh, double = connect(valkey.url, Durability(aof=True, timeout=5))
    async with mesh:
        await double.submit_many(range(100))
        valkey.kill()
        valkey.start()
        assert valkey.command("XLEN", STREAM) == 100
        with pytest.raises(NotConfirmed, match="0 of 2 replicas confirmed"):
            await double.options(durability=Durability(replicas=2, aof=True, timeout=0.1)).submit(1)
        valkey.command("CONFIG", "SET", "appendonly", "no")
        with pytest.raises(NotConfirmed, match="appendonly is disabled"):
            await double.submit(1)
    mesh, double = connect(valkey.url, Durability(aof=True, timeout=5))
    async with mesh:
        with pytest.raises(ConfigurationError, match="nothing was submitted"):
            await double.submit(1)
        assert valkey.command("XLEN", STREAM) == 102


async def test_replicas_can_be_asked_for_their_append_only_files() -> None:
    with make_server("valkey") as primary, make_server("valkey") as replica:
        pair = Pair(primary, replica)
        pair.follow()
        await pair.in_step()
        mesh, double = connect(primary.url, Durability(replicas=1, aof=True, timeout=5))
        async with mesh:
            await double.submit(1)


async def test_a_server_without_waitaof_is_too_old_for_it(redis_url: str, server: RedisServer) -> None:
    version = server.command("INFO", "server")["redis_version"]
    if not version.startswith("7.0"):
        pytest.skip(f"Redis {version} has WAITAOF")
    mesh, double = connect(redis_url, Durability(aof=True, timeout=5))
    async with mesh:
        with pytest.raises(ServerTooOld, match=r"needs Redis 7\.2 or Valkey; nothing was submitted"):
            await double.submit(1)
        assert server.command("EXISTS", STREAM) == 0
        await double.options(durability=Durability()).submit(1)  # the primary's word is enough for this one


async def test_a_primary_that_wants_replicas_takes_nothing_without_them_and_goes_on_with_them(
    pair: Pair,
) -> None:
    """min-replicas-to-write: everything that writes waits, and goes on when the replica is back."""
    runs: list[int] = []
    release = asyncio.Event()
    mesh, double = connect(pair.primary.url, retry_for=1.0, runs=runs)

    @mesh.task
    async def hold(n: int) -> int:
        runs.append(n)
        await release.wait()
        return n

    pair.primary.command("CONFIG", "SET", "min-replicas-to-write", 1)
    pair.primary.command("CONFIG", "SET", "min-replicas-max-lag", LAG)
    await wait_until(lambda: pair.primary.command("INFO", "replication").get("min_slaves_good_slaves") == 1)
    async with mesh, mesh.worker():
        running = await hold.submit(1)
        await wait_until(lambda: runs == [1])
        pair.replica.command("REPLICAOF", "NO", "ONE")
        await wait_until(lambda: pair.primary.command("INFO", "replication")["min_slaves_good_slaves"] == 0)
        with pytest.raises(BrokerUnavailable, match=r"takes no writes now.*NOREPLICAS"):
            await double.submit(2)
        release.set()  # its settle waits
        await asyncio.sleep(2 * LIVENESS_TTL)  # long enough for every lease to run out, were it measured so
        pair.follow()
        assert await running.result(timeout=10) == 1
        assert await (await double.submit(3)).result(timeout=5) == 6
        await wait_until(lambda: pair.primary.command("XLEN", STREAM) == 0)
    assert runs == [1, 3]


def test_durations_and_counts_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="replicas"):
        Durability(replicas=-1)
    with pytest.raises(ConfigurationError, match="timeout"):
        Durability(replicas=1, timeout=0)
    mesh, double = connect("redis://127.0.0.1:1/0")
    with pytest.raises(ConfigurationError, match="write durability=Durability"):
        double.options(durability=1)  # type: ignore[typeddict-item]
    assert mesh.name == "durable"
