"""What happens to a task that fails, hangs, or waits for too long."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import redis

from taskmesh import ConfigurationError, Context, Mesh, Retry, TaskExpired, TaskFailed, WorkerSettings
from taskmesh.testing import MovableClock, wait_until
from tests.conftest import MakeMesh


async def test_a_failed_task_is_tried_again_after_a_growing_pause(mesh: Mesh) -> None:
    tries: list[tuple[int, float]] = []

    @mesh.task(retry=Retry(attempts=3, delay=0.1, factor=3, jitter=0))
    async def flaky(ctx: Context) -> str:
        tries.append((ctx.attempt, time.monotonic()))
        if ctx.attempt < 3:
            raise OSError("not yet")
        return "at last"

    async with mesh.worker():
        assert await (await flaky.submit()).result(timeout=5) == "at last"
    attempts, times = zip(*tries, strict=True)
    assert attempts == (1, 2, 3)
    assert 0.1 <= times[1] - times[0] < 0.3 <= times[2] - times[1]


async def test_when_its_tries_are_spent_it_has_failed(mesh: Mesh) -> None:
    @mesh.task(retry=Retry(attempts=2, delay=0.01))
    async def hopeless(ctx: Context) -> None:
        raise OSError(f"attempt {ctx.attempt} of {ctx.max_attempts}")

    async with mesh.worker():
        with pytest.raises(TaskFailed, match="attempt 2 of 2"):
            await (await hopeless.submit()).result(timeout=5)


async def test_only_the_exceptions_named_are_worth_another_try(mesh: Mesh) -> None:
    tries = 0

    @mesh.task(retry=Retry(attempts=5, delay=0.01, on=(OSError,)))
    async def strict() -> None:
        nonlocal tries
        tries += 1
        raise ValueError("wrong for good")

    async with mesh.worker():
        with pytest.raises(TaskFailed, match="wrong for good"):
            await (await strict.submit()).result(timeout=5)
    assert tries == 1


async def test_a_handler_may_ask_for_another_try_itself(mesh: Mesh) -> None:
    @mesh.task(retry=Retry(attempts=2, delay=60, on=()))
    async def poll(ctx: Context) -> int:
        if ctx.attempt == 1:
            ctx.retry(delay=0.05)
        return ctx.attempt

    async with mesh.worker():
        assert await (await poll.submit()).result(timeout=5) == 2


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_run_over_its_timeout_fails_with_timeout_error(mesh: Mesh, in_thread: bool) -> None:
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def hang() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def hang_in_thread() -> None:
        time.sleep(0.5)
        loop.call_soon_threadsafe(ended.set)

    task = mesh.task(timeout=0.1, raises=(TimeoutError,))(hang_in_thread if in_thread else hang)
    async with mesh.worker():
        with pytest.raises(TimeoutError, match=r"longer than 0\.1 s") as caught:
            await (await task.submit()).result(timeout=5)
        assert not isinstance(caught.value, TaskFailed)
        await asyncio.wait_for(ended.wait(), 5)


async def test_a_timeout_is_a_failure_that_can_be_retried(mesh: Mesh) -> None:
    @mesh.task(timeout=0.1, retry=Retry(attempts=2, delay=0.01))
    async def slow_once(ctx: Context) -> int:
        if ctx.attempt == 1:
            await asyncio.sleep(60)
        return ctx.attempt

    async with mesh.worker():
        assert await (await slow_once.submit()).result(timeout=5) == 2


async def test_a_message_that_has_not_started_by_its_expiry_is_dropped(make_mesh: MakeMesh) -> None:
    clock = MovableClock()
    mesh = make_mesh(clock=clock)
    ran: list[str] = []

    @mesh.task(expires=30)
    async def greet(name: str) -> None:
        ran.append(name)

    async with mesh:
        late = await greet.submit("late")
        clock.advance(31)
        in_time = await greet.options(expires=60).submit("in time")
        async with mesh.worker():
            with pytest.raises(TaskExpired):
                await late.result(timeout=5)
            await in_time.result(timeout=5)
    assert ran == ["in time"]


async def test_a_handler_that_swallows_its_cancellation_and_returns_has_succeeded(mesh: Mesh) -> None:
    @mesh.task(timeout=0.05)
    async def stubborn() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            return "finished anyway"
        return "never"

    async with mesh.worker():
        assert await (await stubborn.submit()).result(timeout=5) == "finished anyway"


async def test_a_handler_that_swallows_every_cancellation_does_not_hold_the_stop_up(mesh: Mesh) -> None:
    release = asyncio.Event()
    started = asyncio.Event()

    @mesh.task
    async def immortal() -> None:
        started.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue

    began = 0.0
    async with mesh.worker(WorkerSettings(drain_timeout=0.1)):
        await immortal.submit()
        await asyncio.wait_for(started.wait(), 5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    release.set()
    await asyncio.sleep(0)


async def test_a_handler_that_raises_cancelled_error_by_itself_has_failed(mesh: Mesh) -> None:
    @mesh.task
    async def odd() -> None:
        await asyncio.sleep(0)
        raise asyncio.CancelledError("by itself")

    async with mesh.worker():
        with pytest.raises(TaskFailed, match="CancelledError"):
            await (await odd.submit()).result(timeout=5)


async def test_a_retry_waits_in_redis_not_in_the_worker(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task(retry=Retry(attempts=2, delay=30))
    async def fails() -> None:
        raise OSError

    async with mesh.worker():
        await fails.submit()
        await wait_until(lambda: plain.zcard("taskmesh:{test:default:0}:delayed") == 1)
        assert plain.xlen("taskmesh:{test:default:0}:tasks:normal") == 0


async def test_every_try_gets_the_arguments_as_they_were_submitted(mesh: Mesh) -> None:
    seen: list[int] = []

    @mesh.task(retry=Retry(attempts=2, delay=0.0))
    async def greedy(items: Any) -> None:
        seen.append(len(items))
        items.append(object())  # nothing that could travel
        raise OSError("not yet")

    async with mesh.worker():
        with pytest.raises(TaskFailed, match="not yet"):
            await (await greedy.submit([0])).result(timeout=5)
    assert seen == [1, 1]


async def test_an_error_whose_text_is_not_utf8_arrives(mesh: Mesh) -> None:
    @mesh.task
    async def read() -> None:
        raise ValueError("no file \udcff")

    async with mesh.worker():
        with pytest.raises(TaskFailed, match=r"no file \\udcff"):
            await (await read.submit()).result(timeout=5)


@pytest.mark.parametrize("delay", [float("inf"), float("nan"), "5"])
async def test_a_delay_that_is_none_fails_the_task(mesh: Mesh, delay: Any) -> None:
    @mesh.task(retry=Retry(attempts=2, on=()))
    async def later(ctx: Context) -> None:
        ctx.retry(delay)

    async with mesh.worker():
        with pytest.raises(TaskFailed, match=r"delay is|not supported"):
            await (await later.submit()).result(timeout=5)


def test_a_message_needs_one_delivery(make_mesh: MakeMesh) -> None:
    with pytest.raises(ConfigurationError, match="max_deliveries"):
        make_mesh().task(max_deliveries=0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"retry": 3}, r"retry is 3; write retry=Retry\(attempts=3\)"),
        ({"priority": "high"}, "write priority=Priority.HIGH"),
        ({"batch": 64}, r"write batch=Batch\(max_rows=64\)"),
        ({"raises": KeyError}, "write a tuple of exception types"),
    ],
)
def test_options_of_another_type_are_refused_where_the_task_is_declared(
    mesh: Mesh, options: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        mesh.task(**options)
