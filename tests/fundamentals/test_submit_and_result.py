"""The everyday path: define a task, submit it, await its result."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest
import redis

from taskmesh import (
    ConfigurationError,
    Context,
    Mesh,
    ResultTimeout,
    ResultUnavailable,
    UnknownTask,
    WorkerSettings,
    as_completed,
)
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh


async def test_a_task_runs_in_a_worker_and_its_result_comes_back(mesh: Mesh) -> None:
    @mesh.task
    async def add(a: int, b: int = 10) -> int:
        return a + b

    async with mesh.worker():
        handle = await add.submit(1, 2)
        assert await handle.result(timeout=5) == 3
        assert await (await add.submit(1)).result(timeout=5) == 11
        assert await (await add.submit(a=1, b=5)).result(timeout=5) == 6


async def test_calling_a_task_runs_it_right_here(mesh: Mesh) -> None:
    @mesh.task
    async def double(n: int) -> int:
        return 2 * n

    @mesh.task
    def half(ctx: Context, n: int) -> float:
        assert ctx.worker == "local"
        return n / 2

    assert await double(21) == 42  # no worker runs
    assert await half(1) == 0.5


async def test_plain_functions_run_in_threads(mesh: Mesh) -> None:
    @mesh.task
    def where() -> str:
        import threading

        return threading.current_thread().name

    async with mesh.worker():
        assert (await (await where.submit()).result(timeout=5)).startswith("taskmesh")


async def test_a_task_submitted_before_any_worker_waits_for_one(mesh: Mesh) -> None:
    @mesh.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    handle = await greet.submit("ada")
    with pytest.raises(ResultTimeout):
        await handle.result(timeout=0.05)
    async with mesh.worker():
        assert await handle.result(timeout=5) == "hello ada"  # the handle can be awaited again


async def test_a_result_timeout_is_a_timeout_error(mesh: Mesh) -> None:
    @mesh.task
    async def never() -> None: ...

    with pytest.raises(TimeoutError):
        await (await never.submit()).result(timeout=0.01)


async def test_several_may_wait_for_one_result_and_one_may_give_up(mesh: Mesh) -> None:
    @mesh.task
    async def slow() -> str:
        await asyncio.sleep(0.2)
        return "done"

    async with mesh.worker():
        handle = await slow.submit()
        patient = asyncio.create_task(handle.result(timeout=5))
        with pytest.raises(ResultTimeout):
            await handle.result(timeout=0.02)
        assert await asyncio.wait_for(patient, 0.9) == "done"  # pushed, not found by a later look


async def test_the_context_tells_a_handler_about_its_run(mesh: Mesh) -> None:
    @mesh.task(queue="mail")
    async def about(ctx: Context, word: str) -> list[str]:
        return [ctx.task_id, ctx.task, ctx.queue, str(ctx.attempt), str(ctx.deliveries), word]

    async with mesh.worker():
        handle = await about.submit("x")
        assert await handle.result(timeout=5) == [handle.id, "about", "mail", "1", "1", "x"]


async def test_submit_many_and_results_in_the_order_of_the_items(mesh: Mesh) -> None:
    @mesh.task
    async def square(n: int) -> int:
        return n * n

    async with mesh.worker():
        handles = await square.submit_many(range(2500))
        assert [await handle.result(timeout=10) for handle in handles] == [n * n for n in range(2500)]


async def test_bind_submits_calls_of_several_arguments(mesh: Mesh) -> None:
    @mesh.task
    async def power(base: int, exponent: int = 2) -> int:
        return int(base**exponent)

    async with mesh.worker():
        calls = [power.bind(2, 3), power.bind(5), power.bind(base=2, exponent=10)]
        handles = await power.submit_many(calls)
        assert [await handle.result(timeout=5) for handle in handles] == [8, 25, 1024]


async def test_map_yields_as_they_finish(mesh: Mesh) -> None:
    @mesh.task
    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async with mesh.worker():
        finished = [await done.result() async for done in wait.map([0.4, 0.2, 0.0])]
    assert finished == [0.0, 0.2, 0.4]


async def test_map_takes_a_long_iterable_as_results_come(mesh: Mesh) -> None:
    @mesh.task
    async def same(n: int) -> int:
        return n

    taken = 0

    def numbers() -> Iterator[int]:
        nonlocal taken
        for n in range(3000):
            taken = n
            yield n

    async with mesh.worker():
        seen = 0
        async for _ in same.map(numbers(), window=100):
            seen += 1
            assert taken <= seen + 100
    assert seen == 3000


async def test_as_completed_gives_handles_in_the_order_of_their_ends(mesh: Mesh) -> None:
    @mesh.task
    async def wait(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    async with mesh.worker():
        handles = [await wait.submit(seconds) for seconds in (0.3, 0.0)]
        assert [await handle.result() async for handle in as_completed(handles)] == [0.0, 0.3]


async def test_tasks_can_be_submitted_by_name(mesh: Mesh) -> None:
    @mesh.task(name="text.upper")
    async def upper(text: str) -> str:
        return text.upper()

    async with mesh.worker():
        assert await (await mesh.submit("text.upper", "a")).result(timeout=5) == "A"
    with pytest.raises(UnknownTask, match=r"text\.upper"):
        await mesh.submit("text.lower", "A")


async def test_a_handle_can_be_made_elsewhere_from_its_id(make_mesh: MakeMesh) -> None:
    meshes = [make_mesh(), make_mesh()]

    async def double(n: int) -> int:
        return 2 * n

    here, there = [mesh.task(double) for mesh in meshes]
    async with meshes[0], meshes[1], meshes[0].worker():
        submitted = await here.submit(4)
        assert await there.handle(submitted.id).result(timeout=5) == 8


async def test_meshes_of_different_names_do_not_see_each_other(make_mesh: MakeMesh) -> None:
    mine, other = make_mesh("mine"), make_mesh("other")

    async def who(mesh: str) -> str:
        return mesh

    task = mine.task(who)
    other.task(who)
    async with mine, other, other.worker():
        handle = await task.submit("mine")
        with pytest.raises(ResultTimeout):
            await handle.result(timeout=0.2)


async def test_results_can_be_switched_off(mesh: Mesh, plain: redis.Redis) -> None:
    ran = asyncio.Event()

    @mesh.task(result_ttl=0)
    async def quiet() -> None:
        ran.set()

    async with mesh.worker():
        handle = await quiet.submit()
        await asyncio.wait_for(ran.wait(), 5)
        with pytest.raises(ResultUnavailable, match="keeps no results"):
            await handle.result()
    assert plain.keys("*:result:*") == []


async def test_single_submissions_may_change_how_long_the_result_is_kept(
    mesh: Mesh, plain: redis.Redis
) -> None:
    @mesh.task(result_ttl=0)
    async def quiet() -> int:
        return 1

    @mesh.task
    async def kept() -> int:
        return 2

    async with mesh.worker():
        assert await (await quiet.options(result_ttl=60).submit()).result(timeout=5) == 1
        [record] = plain.keys("*:result:*")
        assert 50_000 < plain.pttl(record) <= 60_000
        await kept.options(result_ttl=0).submit()
    assert plain.keys("*:result:*") == [record]


async def test_results_expire_and_say_so(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task(result_ttl=0.05)
    async def fleeting() -> int:
        return 1

    handle = await fleeting.submit()
    plain.delete(*plain.keys("*:replies:*"))  # as if the push had been missed
    async with mesh.worker():
        await wait_until(lambda: plain.xlen("taskmesh:{test:default:0}:tasks:normal") == 0)
        await wait_until(lambda: not plain.keys("*:result:*"))
        with pytest.raises(ResultUnavailable, match="has expired"):
            await handle.result(timeout=8)


async def test_a_mesh_that_is_not_entered_says_so(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task
    async def anything() -> None: ...

    with pytest.raises(ConfigurationError, match="async with mesh"):
        await anything.submit()


async def test_a_mesh_can_be_entered_again_and_by_several_at_once(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()

    @mesh.task
    async def one() -> int:
        return 1

    async def use() -> int:
        async with mesh, mesh.worker():
            return await (await one.submit()).result(timeout=5)

    assert await use() == 1
    assert list(await asyncio.gather(use(), use(), use())) == [1, 1, 1]


async def test_two_workers_of_one_mesh_share_the_work(mesh: Mesh) -> None:
    @mesh.task
    async def who(ctx: Context) -> str:
        await asyncio.sleep(0.02)
        return ctx.worker

    settings = WorkerSettings(concurrency=1)
    async with mesh.worker(settings) as first, mesh.worker(settings) as second:
        handles = await who.submit_many([who.bind() for _ in range(20)])
        workers = {await handle.result(timeout=10) for handle in handles}
    assert workers == {first.worker.decode(), second.worker.decode()}


async def test_names_and_handlers_that_cannot_work_are_refused_early(mesh: Mesh) -> None:
    with pytest.raises(ConfigurationError, match="becomes part of Redis keys"):
        Mesh("with space")

    @mesh.task
    async def twice() -> None: ...

    with pytest.raises(ConfigurationError, match="two tasks are named"):
        mesh.task(twice.definition.function)
    with pytest.raises(ConfigurationError, match="generators are not supported"):

        @mesh.task
        async def stream():  # type: ignore[no-untyped-def]
            yield 1

    with pytest.raises(ConfigurationError, match="no tasks"):
        async with Mesh("empty", settings=mesh.settings).worker():
            pass


async def test_tasks_that_finish_in_any_order_are_all_settled(mesh: Mesh, plain: redis.Redis) -> None:
    @mesh.task
    async def work(n: int, seconds: float) -> int:
        await asyncio.sleep(seconds)
        return n

    draw = random.Random(1)
    async with mesh.worker(WorkerSettings(concurrency=200)):
        calls = [work.bind(n, draw.choice([0.0, draw.random() * 0.1])) for n in range(1000)]
        handles = await work.submit_many(calls)
        assert [await handle.result(timeout=20) for handle in handles] == list(range(1000))
        await wait_until(lambda: plain.xlen("taskmesh:{test:default:0}:tasks:normal") == 0)
        assert plain.xpending("taskmesh:{test:default:0}:tasks:normal", "workers")["pending"] == 0
    assert mesh.client.repeats == 0
