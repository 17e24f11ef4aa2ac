"""Outcomes that nobody fetches, that nobody was told of, and that are gone: whoever waits is told, and in time."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from taskmesh import Mesh, ResultTimeout, ResultUnavailable, Retry, WorkerSettings
from taskmesh.testing import KeyLeaks, RedisServer, wait_until
from tests.conftest import MakeMesh, settings_for_tests

PREFIX = "taskmesh:{test:default:0}:"


async def no_records(plain: redis.Redis) -> None:
    """Return when every message has ended and every record has expired."""
    await wait_until(
        lambda: plain.xlen(PREFIX + "tasks:normal") == 0 and not plain.exists(PREFIX + "delayed")
    )
    await wait_until(lambda: not plain.keys(PREFIX + "result:*"))


async def test_ten_thousand_results_that_nobody_fetches_go_by_themselves(
    make_mesh: MakeMesh, plain: redis.Redis, redis_url: str
) -> None:
    mesh = make_mesh(result_ttl=3600)

    @mesh.task
    async def work(n: int) -> int:
        return n

    with KeyLeaks(redis_url):
        async with mesh, mesh.worker():
            await work.submit_many(range(10_000))
            await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0, timeout=30)
        records = list(plain.scan_iter(PREFIX + "result:*", count=1000))
        with plain.pipeline(transaction=False) as pipe:
            for key in records:
                pipe.pttl(key)
            lives = pipe.execute()
        assert len(records) == 10_000
        assert all(0 < life <= 3_600_000 for life in lives)
        assert not plain.keys(PREFIX + "replies:*")


async def test_a_wake_up_that_is_lost_costs_a_second(mesh: Mesh, plain: redis.Redis) -> None:
    release = asyncio.Event()

    @mesh.task
    async def work(n: int) -> int:
        await release.wait()
        return n

    async with mesh.worker():
        handles = await work.submit_many(range(10))
        waiting = asyncio.gather(*(handle.result(timeout=10) for handle in handles))
        await asyncio.sleep(0.1)
        plain.delete(*plain.keys(PREFIX + "replies:*"))  # nobody is told any more
        release.set()
        await wait_until(lambda: plain.xlen(PREFIX + "tasks:normal") == 0)
        began = time.monotonic()
        assert await waiting == list(range(10))
        assert time.monotonic() - began < 3


async def test_the_timeout_holds_while_the_server_does_not_answer(free_server: RedisServer) -> None:
    mesh = Mesh("test", settings=settings_for_tests(free_server.url, result_ttl=0.5))

    @mesh.task
    async def work() -> None: ...

    async with mesh:
        handle = await work.submit()
        free_server.pause()
        for each in (handle, work.handle(handle.id)):
            began = time.monotonic()
            with pytest.raises(ResultTimeout):
                await each.result(timeout=1.5)  # longer than the first look for the record
            assert time.monotonic() - began < 2.0
        free_server.resume()


@pytest.mark.parametrize("kind", ["plain", "retried", "delayed"])
async def test_an_expired_record_is_told_from_a_task_that_is_under_way(
    make_mesh: MakeMesh, plain: redis.Redis, kind: str
) -> None:
    """By the handle that submitted it, and by one that was made from its id."""
    mesh, elsewhere = make_mesh(result_ttl=0.2), make_mesh(result_ttl=0.2)

    @mesh.task(retry=Retry(attempts=3, delay=0.01))
    async def work(kind: str) -> int:
        raise ValueError(kind)

    other = elsewhere.task(retry=Retry(attempts=3, delay=0.01))(work.definition.function)
    async with mesh, elsewhere:
        handle = await (work.submit_in(0.1, kind) if kind == "delayed" else work.submit(kind))
        plain.delete(*plain.keys(PREFIX + "replies:*"))
        async with mesh.worker():
            await no_records(plain)
        for each in (handle, other.handle(handle.id)):
            began = time.monotonic()
            with pytest.raises(ResultUnavailable, match="has expired"):
                await each.result()
            assert time.monotonic() - began < 3


async def test_many_that_ask_at_once_share_a_look(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    mesh, elsewhere = make_mesh(result_ttl=0.2), make_mesh(result_ttl=0.2)

    async def work(n: int) -> None: ...

    task, other = mesh.task(work), elsewhere.task(work)
    async with mesh, elsewhere:
        ended = await task.submit_many(range(1500))
        async with mesh.worker():
            await no_records(plain)
        waiting = await task.submit_many(range(1500))
        plain.config_resetstat()
        handles = [other.handle(handle.id) for handle in [*ended, *waiting]]
        outcomes = await asyncio.gather(
            *(each.outcome(timeout=3) for each in handles), return_exceptions=True
        )
        looks = plain.info("commandstats")["cmdstat_evalsha"]["calls"]
    assert all(isinstance(outcome, ResultUnavailable) for outcome in outcomes[:1500])
    assert all(isinstance(outcome, ResultTimeout) for outcome in outcomes[1500:])
    assert looks <= 50  # two hundred in one


async def test_what_waits_is_not_taken_for_expired_wherever_it_is(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    """In its queue, for later, for its next try, in a worker's hands, or parked."""
    mesh, stranger = make_mesh(result_ttl=0.2), make_mesh(result_ttl=0.2)
    release = asyncio.Event()

    @mesh.task
    async def slow(n: int) -> int:
        await release.wait()
        return n

    @mesh.task(retry=Retry(attempts=2, delay=60))
    async def flaky(n: int) -> None:
        raise OSError

    @mesh.task(queue="idle")
    async def unserved(n: int) -> None: ...

    @mesh.task
    async def unknown(n: int) -> None: ...

    for task in (slow, flaky):
        stranger.add_task(task.definition.function, options=task.definition.options)
    async with mesh, stranger, stranger.worker(WorkerSettings(drain_timeout=5)):
        parked = await unknown.submit(1)
        handles = [
            parked,
            await unserved.submit(2),
            await slow.submit_in(60, 3),
            await flaky.submit(4),
            await slow.submit(5),
        ]
        await wait_until(lambda: plain.exists(PREFIX + "parked") and plain.zcard(PREFIX + "delayed") == 2)
        elsewhere = [mesh.get_task(handle.task).handle(handle.id) for handle in handles]
        waiting = [each.outcome(timeout=3) for each in (*handles, *elsewhere)]
        assert {type(end) for end in await asyncio.gather(*waiting, return_exceptions=True)} == {
            ResultTimeout
        }
        release.set()
        assert await handles[-1].result(timeout=5) == 5


async def test_a_message_that_was_put_back_has_not_expired(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    mesh, elsewhere = make_mesh(result_ttl=1.0), make_mesh(result_ttl=1.0)
    mended = False

    async def unlucky(n: int) -> int:
        if not mended:
            raise OSError
        return n

    task, other = mesh.task(unlucky), elsewhere.task(unlucky)
    async with mesh, elsewhere:
        handle = other.handle((await task.submit(7)).id)
        async with mesh.worker():
            await no_records(plain)
        with pytest.raises(ResultUnavailable, match="has expired"):
            await handle.result(timeout=5)
        [letter] = await mesh.dead_letters()
        assert await mesh.requeue(letter)
        with pytest.raises(ResultTimeout):
            await handle.result(timeout=2.5)
        mended = True
        waiting = asyncio.create_task(handle.result(timeout=5))
        async with mesh.worker():
            assert await waiting == 7
