"""What is left of a thousand round trips, once their results have expired: nothing."""

from __future__ import annotations

import redis

from taskmesh.testing import wait_until
from tests.conftest import MakeMesh


async def test_round_trips_leave_keys_and_memory_where_they_were(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh(result_ttl=0.5)

    @mesh.task
    async def echo(number: int) -> int:
        return number

    async def round_trips() -> None:
        for number in range(1000):
            assert await (await echo.submit(number)).result(timeout=5) == number

    def results() -> int:
        return sum(1 for _ in plain.scan_iter("*:result:*", count=1000))

    async with mesh.worker():
        await round_trips()  # scripts, buffers and the allocator are warm after this
        await wait_until(lambda: results() == 0, timeout=10)
        keys, memory = plain.dbsize(), plain.info("memory")["used_memory"]
        await round_trips()
        await wait_until(lambda: results() == 0, timeout=10)
        assert plain.dbsize() == keys
        # The reply stream is trimmed every 256 entries or 5 s: one cut more or less is within this.
        assert plain.info("memory")["used_memory"] < memory + 64 * 1024
