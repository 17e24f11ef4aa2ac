"""Batch handlers: one submission is one row, one call takes many, each row has an end of its own."""

from __future__ import annotations

import asyncio
import time

import pytest

from taskmesh import (
    Batch,
    ConfigurationError,
    Context,
    InvalidArguments,
    Mesh,
    Retry,
    TaskFailed,
    WorkerSettings,
)
from tests.conftest import MakeMesh


async def test_rows_are_gathered_and_each_caller_gets_its_own(mesh: Mesh) -> None:
    sizes: list[int] = []

    @mesh.task(batch=Batch(max_rows=16, max_wait=0.05))
    async def double(rows: list[int]) -> list[int]:
        sizes.append(len(rows))
        return [2 * row for row in rows]

    async with mesh.worker():
        handles = await double.submit_many(range(100))
        assert [await handle.result(timeout=5) for handle in handles] == [2 * n for n in range(100)]
    assert max(sizes) == 16
    assert len(sizes) <= 12


async def test_no_call_gets_more_than_max_rows(mesh: Mesh) -> None:
    sizes: list[int] = []

    @mesh.task(batch=Batch(max_rows=7, max_wait=0.01))
    async def take(rows: list[int]) -> list[None]:
        sizes.append(len(rows))
        await asyncio.sleep(0.001)
        return [None] * len(rows)

    async with mesh.worker(WorkerSettings(concurrency=2)):
        for handle in await take.submit_many(range(500)):
            await handle.result(timeout=10)
    assert sum(sizes) == 500
    assert max(sizes) <= 7


async def test_a_lone_row_waits_no_longer_than_max_wait(mesh: Mesh) -> None:
    @mesh.task(batch=Batch(max_rows=100, max_wait=0.1))
    async def same(rows: list[int]) -> list[int]:
        return rows

    async with mesh.worker():
        began = time.monotonic()
        assert await (await same.submit(1)).result(timeout=5) == 1
        assert 0.1 <= time.monotonic() - began < 0.4


async def test_a_row_may_have_an_exception_for_its_result(mesh: Mesh) -> None:
    @mesh.task(batch=Batch(max_rows=3, max_wait=0.2), raises=(ValueError,))
    async def root(rows: list[float]) -> list[float | Exception]:
        return [row**0.5 if row >= 0 else ValueError(f"{row:g} has no root") for row in rows]

    async with mesh.worker():
        good, bad, other = await root.submit_many([4.0, -1.0, 9.0])
        assert await good.result(timeout=5) == 2.0
        assert await other.result(timeout=5) == 3.0
        with pytest.raises(ValueError, match="-1 has no root"):
            await bad.result(timeout=5)


async def test_one_bad_row_among_64_fails_alone(mesh: Mesh) -> None:
    calls: list[int] = []

    @mesh.task(batch=Batch(max_rows=64, max_wait=0.2))
    async def invert(rows: list[int]) -> list[float]:
        calls.append(len(rows))
        return [1 / row for row in rows]

    async with mesh.worker():
        handles = await invert.submit_many([*range(1, 38), 0, *range(38, 64)])
        outcomes = await asyncio.gather(
            *(handle.result(timeout=5) for handle in handles), return_exceptions=True
        )
        [failed] = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        assert outcomes.index(failed) == 37
        assert isinstance(failed, TaskFailed)
        assert failed.type == "ZeroDivisionError"
        [letter] = await mesh.dead_letters()
        assert letter.message is not None
        assert letter.message.args == (0,)
    assert len(calls) <= 13  # bisected, not row by row


async def test_a_row_that_does_not_fit_fails_alone(make_mesh: MakeMesh, mesh: Mesh) -> None:
    older = make_mesh()

    @older.task(batch=Batch(), name="double")
    async def double_anything(rows: list[object]) -> list[object]:
        return rows

    @mesh.task(batch=Batch(max_rows=3, max_wait=0.2))
    async def double(rows: list[int]) -> list[int]:
        return [2 * row for row in rows]

    with pytest.raises(InvalidArguments):
        await double.submit("two")  # type: ignore[arg-type]
    async with older, mesh.worker(WorkerSettings(misfit_patience=0)):
        one, two, three = await double_anything.submit_many([1, "two", 3])
        assert [await one.result(timeout=5), await three.result(timeout=5)] == [2, 6]
        with pytest.raises(TaskFailed, match="InvalidArguments"):
            await two.result(timeout=5)


async def test_a_handler_that_returns_too_few_results_fails_them_all(mesh: Mesh) -> None:
    @mesh.task(batch=Batch(max_rows=2, max_wait=0.2))
    async def forgetful(rows: list[int]) -> list[int]:
        return rows[1:]

    async with mesh.worker():
        for handle in await forgetful.submit_many([1, 2]):
            with pytest.raises(TaskFailed, match="one result for each"):
                await handle.result(timeout=5)


async def test_rows_are_retried_singly(mesh: Mesh) -> None:
    seen: list[list[int]] = []

    @mesh.task(batch=Batch(max_rows=4, max_wait=0.1), retry=Retry(attempts=2, delay=0.01))
    async def flaky(rows: list[int]) -> list[int | Exception]:
        seen.append(rows)
        first = len(seen) == 1
        return [OSError("once") if first and row == 2 else row for row in rows]

    async with mesh.worker():
        handles = await flaky.submit_many([1, 2, 3, 4])
        assert [await handle.result(timeout=5) for handle in handles] == [1, 2, 3, 4]
    assert seen == [[1, 2, 3, 4], [2]]


async def test_batch_handlers_may_be_plain_functions_and_take_a_context(mesh: Mesh) -> None:
    @mesh.task(batch=Batch(max_rows=2, max_wait=0.05), name="plain")
    def double(rows: list[int]) -> list[int]:
        return [2 * row for row in rows]

    def with_context(ctx: Context, rows: list[str]) -> list[str]:
        return [f"{ctx.task} {row}" for row in rows]

    contextual = mesh.task(batch=Batch(max_rows=2, max_wait=0.05))(with_context)
    async with mesh.worker():
        assert await (await double.submit(2)).result(timeout=5) == 4
        assert await (await contextual.submit("a")).result(timeout=5) == "with_context a"
    assert await double(3) == 6


async def test_a_batch_that_takes_too_long_times_out_for_every_row(mesh: Mesh) -> None:
    @mesh.task(batch=Batch(max_rows=2, max_wait=0.2), timeout=0.1, raises=(TimeoutError,))
    async def hang(rows: list[int]) -> list[int]:
        await asyncio.sleep(60)
        return rows

    async with mesh.worker():
        for handle in await hang.submit_many([1, 2]):
            with pytest.raises(TimeoutError):
                await handle.result(timeout=5)


def test_a_batch_handler_takes_one_list(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    with pytest.raises(ConfigurationError, match="one list of items"):

        @mesh.task(batch=Batch())  # type: ignore[arg-type]
        async def two(rows: list[int], more: int) -> list[int]:
            return rows

    with pytest.raises(ConfigurationError, match="max_rows"):
        Batch(max_rows=0)
