"""Handlers in processes: what holds for others holds for them, and what befalls them befalls nobody else."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import redis

from taskmesh import (
    Batch,
    Cancelled,
    ConfigurationError,
    Mesh,
    TaskCancelled,
    TaskFailed,
    Worker,
    WorkerSettings,
)
from taskmesh.testing import wait_until
from tests.conftest import settings_for_tests
from tests.fundamentals import process_tasks as tasks
from tests.fundamentals.process_tasks import marked

PREFIX = "taskmesh:{test:default:0}:"


@pytest.fixture
async def mesh(redis_url: str) -> AsyncIterator[Mesh]:
    tasks.mesh.settings = settings_for_tests(redis_url)
    async with tasks.mesh:
        yield tasks.mesh


@pytest.fixture
async def worker(mesh: Mesh) -> AsyncIterator[Worker]:
    async with mesh.worker(WorkerSettings(processes=2, drain_timeout=5)) as worker:
        yield worker


@pytest.fixture
def marks(tmp_path: Path) -> str:
    return str(tmp_path / "marks")


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state not in "ZX"


# what holds for every handler


async def test_a_handler_runs_in_a_process_that_is_used_again(worker: Worker) -> None:
    first = await (await tasks.pid.submit()).result(timeout=10)
    assert first != os.getpid()
    assert await (await tasks.pid.submit()).result(timeout=5) == first


async def test_an_exception_brings_its_traceback_from_there(worker: Worker) -> None:
    with pytest.raises(TaskFailed, match="ValueError: no 7") as caught:
        await (await tasks.fails.submit(7)).result(timeout=10)
    assert 'raise ValueError(f"no {cents}")' in caught.value.traceback
    assert "process_main" not in caught.value.traceback
    assert caught.value.type == "ValueError"


async def test_result_raises_the_type_that_the_task_names(worker: Worker) -> None:
    with pytest.raises(tasks.Declined) as caught:
        await (await tasks.declines.submit(5)).result(timeout=10)
    assert caught.value.args == ("card", 5)


async def test_sensitive_arguments_stay_out_of_failures(worker: Worker) -> None:
    with pytest.raises(TaskFailed) as caught:
        await (await tasks.leaks.submit("hunter2 is it")).result(timeout=10)
    assert "hunter2" not in str(caught.value) + caught.value.traceback


async def test_retries_and_a_context(mesh: Mesh, worker: Worker) -> None:
    assert await (await tasks.flaky.submit()).result(timeout=10) == 3
    with pytest.raises(TaskFailed, match="another try"):
        await (await tasks.asks_again.submit()).result(timeout=10)


async def test_sys_exit_and_values_that_cannot_travel_are_failures(worker: Worker) -> None:
    with pytest.raises(TaskFailed, match="SystemExit: enough"):
        await (await tasks.exits.submit()).result(timeout=10)
    with pytest.raises(TaskFailed, match="cannot travel"):
        await (await tasks.returns_nonsense.submit()).result(timeout=10)


async def test_large_arguments_and_results(worker: Worker) -> None:
    data = os.urandom(3_000_000)
    assert await (await tasks.size.submit(data)).result(timeout=20) == data * 2


async def test_middleware_runs_there_too(worker: Worker) -> None:
    text = await (await tasks.seen_by_middleware.submit("seen")).result(timeout=10)
    assert text.startswith("seen in ")
    assert str(os.getpid()) not in text


async def test_an_async_handler_has_a_context_and_can_submit(worker: Worker) -> None:
    n, name, pid = await (await tasks.submits.submit(3)).result(timeout=10)
    assert (n, name) == (3, worker.worker.decode())
    assert pid != os.getpid()


async def test_what_a_handler_forks_heeds_signals_as_ever(worker: Worker) -> None:
    assert await (await tasks.forks.submit()).result(timeout=10) == -signal.SIGTERM


# side by side


async def test_two_processes_compute_at_once_and_the_worker_stays_responsive(
    worker: Worker, marks: str
) -> None:
    handles = await tasks.pid.submit_many([0.5, 0.5])
    await asyncio.gather(*(handle.result(timeout=10) for handle in handles))  # both have started once
    handles = await tasks.count_to.submit_many([3_000_000] * 4)
    ended = asyncio.gather(*(handle.result(timeout=60) for handle in handles))
    longest = 0.0
    while not ended.done():
        began = time.monotonic()
        assert await (await tasks.plain.submit(1)).result(timeout=5) == 1
        longest = max(longest, time.monotonic() - began)
    assert len(set(await ended)) == 2
    assert longest < 1.0


async def test_what_waits_for_a_process_can_be_cancelled_and_does_not_hold_others_up(
    worker: Worker,
) -> None:
    running = await tasks.pid.submit_many([1.0, 1.0])
    waiting = await tasks.pid.submit(0.0)
    assert await (await tasks.plain.submit(1)).result(timeout=5) == 1
    await waiting.cancel()
    with pytest.raises(TaskCancelled):
        await waiting.result(timeout=0.9)
    for handle in running:
        assert await handle.result(timeout=10)


async def test_a_worker_fetches_no_more_than_its_processes_take(mesh: Mesh, plain: redis.Redis) -> None:
    lane = "taskmesh:{test:heavy:0}:tasks:normal"
    handles = await tasks.heavy.submit_many([0.3] * 20)
    async with mesh.worker(WorkerSettings(processes=2, queues=("heavy",), drain_timeout=0.0)):
        await handles[0].result(timeout=10)
        await handles[3].result(timeout=10)
        assert plain.xpending(lane, "workers")["pending"] <= 6


async def test_what_waits_for_a_process_goes_to_a_worker_that_has_one(mesh: Mesh) -> None:
    settings = WorkerSettings(processes=1)
    async with mesh.worker(settings) as first:
        handles = await tasks.where.submit_many([0.2] * 20)  # their queue has other tasks, too
        await handles[0].result(timeout=10)
        async with mesh.worker(settings) as second:
            workers = [await handle.result(timeout=10) for handle in handles]
    assert min(workers.count(each.worker.decode()) for each in (first, second)) >= 2


# stopping them


async def test_a_timeout_kills_the_process(worker: Worker, marks: str) -> None:
    await (await tasks.pid.submit()).result(timeout=10)  # it has started
    with pytest.raises(TaskFailed, match=r"TimeoutError: the handler ran longer than 0\.3 s"):
        await (await tasks.slow.submit(marks)).result(timeout=10)
    [[pid]] = marked(marks)
    await wait_until(lambda: not is_alive(pid))
    assert await (await tasks.pid.submit()).result(timeout=10) != pid


async def test_cancelling_kills_the_process_and_what_it_started(worker: Worker, marks: str) -> None:
    handle = await tasks.endless.submit(marks)
    await wait_until(lambda: marked(marks))
    assert await handle.cancel() is Cancelled.REQUESTED
    with pytest.raises(TaskCancelled):
        await handle.result(timeout=5)
    await wait_until(lambda: not any(map(is_alive, marked(marks)[0])))


async def test_a_drain_lets_running_ones_finish_and_hands_the_others_back(
    mesh: Mesh, plain: redis.Redis
) -> None:
    async with mesh.worker(WorkerSettings(processes=1, drain_timeout=10)) as worker:
        handles = await tasks.pid.submit_many([1.0] * 3)
        await wait_until(lambda: plain.xpending(PREFIX + "tasks:normal", "workers")["pending"] == 3)
        await (await tasks.plain.submit(1)).result(timeout=5)
        await asyncio.sleep(0.5)
        await worker.stop()
    assert await handles[0].result(timeout=1)
    entries = plain.xpending_range(PREFIX + "tasks:normal", "workers", "-", "+", 10)
    assert [(entry["consumer"], entry["times_delivered"]) for entry in entries] == [(b"returned", 0)] * 2


async def test_a_drain_that_takes_too_long_kills_and_hands_back(
    mesh: Mesh, plain: redis.Redis, marks: str
) -> None:
    async with mesh.worker(WorkerSettings(processes=1, drain_timeout=0.2)):
        await tasks.endless.submit(marks)
        await wait_until(lambda: marked(marks))
    [[pid, child]] = marked(marks)
    await wait_until(lambda: not (is_alive(pid) or is_alive(child)))
    [entry] = plain.xpending_range(PREFIX + "tasks:normal", "workers", "-", "+", 10)
    assert (entry["consumer"], entry["times_delivered"]) == (b"returned", 0)


# their death


@pytest.mark.parametrize(
    ("how", "words"), [("exit", "exit code 7"), ("kill", r"signal 9 \(SIGKILL\)")], ids=["exit", "kill"]
)
async def test_a_task_that_kills_its_process_kills_nothing_else(
    mesh: Mesh, worker: Worker, marks: str, how: str, words: str
) -> None:
    beside = await tasks.pid.submit(1.0)
    handle = await tasks.dies.submit(marks, how)
    with pytest.raises(TaskFailed, match=f"3 processes died with this message in hand, the last by {words}"):
        await handle.result(timeout=20)
    assert len({pid for [pid] in marked(marks)}) == 3
    [letter] = await mesh.dead_letters()
    assert (letter.reason, letter.deliveries) == ("worker died", 1)
    assert await beside.result(timeout=5)
    assert await (await tasks.plain.submit(1)).result(timeout=5) == 1


async def test_after_one_death_it_is_run_again(worker: Worker, marks: str) -> None:
    pid = await (await tasks.dies_once.submit(marks)).result(timeout=10)
    assert [line[-1] for line in marked(marks)][-1] == pid
    assert len(marked(marks)) == 2


async def test_a_process_that_was_killed_while_it_waited_is_replaced(worker: Worker) -> None:
    first = await (await tasks.pid.submit()).result(timeout=10)
    os.kill(first, 9)
    await wait_until(lambda: not is_alive(first))
    assert await (await tasks.pid.submit()).result(timeout=10) != first


# what cannot be


async def test_a_handler_that_no_process_can_import_is_refused_when_the_worker_starts(mesh: Mesh) -> None:
    local = Mesh("local", settings=mesh.settings)

    @local.task(process=True)
    def inner() -> None: ...

    with pytest.raises(ConfigurationError, match=r"no other process can import.*inside a function"):
        async with local.worker():
            pass


async def test_a_handler_that_was_not_decorated_where_it_is_defined_is_refused(mesh: Mesh) -> None:
    local = Mesh("local", settings=mesh.settings)
    local.task(process=True)(is_alive)
    with pytest.raises(ConfigurationError, match=r"test_processes.is_alive is not this task"):
        async with local.worker():
            pass


def test_batches_do_not_run_in_processes() -> None:
    with pytest.raises(ConfigurationError, match="one message at a time"):
        Mesh("local").task(process=True, batch=Batch())
    with pytest.raises(ConfigurationError, match="processes is 0"):
        WorkerSettings(processes=0)
