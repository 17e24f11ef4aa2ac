"""Arguments and results over the inline limit travel as blobs beside the message, and leave nothing behind."""

from __future__ import annotations

import pytest
import redis

from taskmesh import Context, Mesh, Retry, TaskFailed
from taskmesh.settings import MIB
from taskmesh.testing import KeyLeaks, wait_until
from tests.conftest import MakeMesh

PREFIX = "taskmesh:{test:default:0}:"


async def test_megabytes_go_there_and_back(mesh: Mesh, plain: redis.Redis, redis_url: str) -> None:
    sizes: list[int] = []

    @mesh.task(result_ttl=30)
    async def double(data: bytes) -> bytes:
        sizes.append(plain.memory_usage(PREFIX + "tasks:normal") or 0)
        return data * 2

    data = bytes(range(256)) * (3 * 4096)
    assert len(data) == 3 * MIB
    with KeyLeaks(redis_url):
        async with mesh.worker():
            handle = await double.submit(data)
            assert await handle.result(timeout=20) == data * 2
            assert sizes[0] < 10_000  # the stream carries the reference alone
            await wait_until(lambda: not plain.keys("*:args:*"))
            assert all(0 < plain.pttl(key) <= 30_000 for key in plain.keys("*:result*"))


async def test_large_and_small_ones_keep_their_order_in_a_bulk(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(inline_limit_bytes=1000)

    @mesh.task
    async def size(data: bytes) -> int:
        return len(data)

    async with mesh, mesh.worker():
        sizes = [1, 5000, 2, 3, 6000, 7000, 4]
        handles = await size.submit_many([b"x" * n for n in sizes])
        assert [await handle.result(timeout=10) for handle in handles] == sizes


async def test_a_retry_leaves_large_arguments_where_they_are(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    mesh = make_mesh(inline_limit_bytes=1000)

    @mesh.task(retry=Retry(attempts=2, delay=0.3, jitter=0))
    async def flaky(ctx: Context, data: bytes) -> int:
        if ctx.attempt == 1:
            raise OSError
        return len(data)

    async with mesh, mesh.worker():
        handle = await flaky.submit(b"x" * 100_000)
        await wait_until(lambda: plain.zcard(PREFIX + "delayed") == 1)
        [message] = plain.zrange(PREFIX + "delayed", 0, -1)
        assert len(message) < 200
        assert await handle.result(timeout=5) == 100_000
        await wait_until(lambda: not plain.keys("*:args:*"))


async def test_a_failed_task_keeps_its_large_arguments_until_it_is_put_back(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(inline_limit_bytes=1000)
    broken = True

    @mesh.task
    async def work(data: bytes) -> int:
        if broken:
            raise ValueError
        return len(data)

    async with mesh, mesh.worker():
        handle = await work.submit(b"x" * 5000)
        with pytest.raises(TaskFailed):
            await handle.result(timeout=5)
        broken = False
        [letter] = await mesh.dead_letters()
        await mesh.requeue(letter)
        await wait_until(lambda: not plain.keys("*:args:*"))
        assert await mesh.dead_letters() == []


async def test_large_arguments_that_are_gone_fail_the_task(make_mesh: MakeMesh, plain: redis.Redis) -> None:
    mesh = make_mesh(inline_limit_bytes=1000)

    @mesh.task
    async def work(data: bytes) -> None: ...

    async with mesh:
        handle = await work.submit(b"x" * 5000)
        plain.delete(*plain.keys("*:args:*"))
        async with mesh.worker():
            with pytest.raises(TaskFailed, match="is gone"):
                await handle.result(timeout=5)


async def test_cancelling_a_queued_task_frees_its_large_arguments(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(inline_limit_bytes=1000)

    @mesh.task
    async def work(data: bytes) -> None: ...

    async with mesh:
        handle = await work.submit(b"x" * 5000)
        assert len(plain.keys("*:args:*")) == 1
        await handle.cancel()
        assert plain.keys("*:args:*") == []
