"""Messages that kill their worker: they end among the dead letters, and nothing that ran beside them does."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import time
from collections.abc import Callable

import pytest

from taskmesh import BoundCall, Mesh, TaskFailed
from taskmesh.testing import wait_until
from tests.integration.fault_fleet import Fleet


async def keep_alive(
    fleet: Fleet, until: Callable[[], bool], workers: int = 1, timeout: float = 60.0, **environment: str
) -> None:
    """Start workers again as they die."""
    give_up_at = time.monotonic() + timeout
    alive: list[subprocess.Popen[bytes]] = []
    while not until():
        assert time.monotonic() < give_up_at, "it did not come true"
        alive = [process for process in alive if process.poll() is None]
        while len(alive) < workers:
            alive.append(fleet.launch(**environment))
        await asyncio.sleep(0.02)


def killed(fleet: Fleet) -> int:
    """How many workers were killed."""
    return sum(process.poll() == -signal.SIGKILL for process in fleet.processes)


async def test_a_killer_takes_two_workers_and_a_process_along_and_ends_among_the_dead_letters(
    fleet: Fleet, producer: Mesh
) -> None:
    poison = await producer.get_task("poison").submit()
    handles = await producer.get_task("work").submit_many(range(50))
    ended = asyncio.ensure_future(poison.outcome())
    await keep_alive(fleet, ended.done)
    with pytest.raises(TaskFailed, match=r"3 processes died with this message .* by signal 9 \(SIGKILL\)"):
        await poison.result(timeout=1)
    assert [await handle.result(timeout=10) for handle in handles] == list(range(50))
    runs = fleet.executions("poison")
    assert [deliveries for _, _, deliveries in runs] == ["1", "2", "3"]
    assert killed(fleet) == 2
    assert [int(pid) for _, pid, _ in runs[:2]] == [process.pid for process in fleet.processes[:2]]
    [letter] = await producer.dead_letters()
    assert letter.reason == "worker died"


async def test_a_hundred_in_flight_beside_a_killer_all_succeed(fleet: Fleet, producer: Mesh) -> None:
    neighbours = await producer.get_task("work").submit_many([BoundCall((n, 0.3), {}) for n in range(100)])
    poison = await producer.get_task("poison").submit()
    later = await producer.get_task("work").submit_many(range(100, 200))
    ended = [asyncio.ensure_future(handle.outcome()) for handle in [poison, *neighbours, *later]]
    await keep_alive(
        fleet, lambda: all(future.done() for future in ended), workers=2, timeout=100, CONCURRENCY="110"
    )
    with pytest.raises(TaskFailed, match="died"):
        await poison.result(timeout=1)
    assert [await handle.result(timeout=1) for handle in neighbours] == list(range(100))
    assert [await handle.result(timeout=1) for handle in later] == list(range(100, 200))
    assert len(fleet.executions("poison")) == 3
    assert killed(fleet) == 2
    assert len(await producer.dead_letters()) == 1


async def test_several_killers_at_once_condemn_no_innocent(fleet: Fleet, producer: Mesh) -> None:
    work, poison = producer.get_task("work"), producer.get_task("poison")
    innocents, killers = [], []
    for first in range(0, 40, 8):
        innocents += await work.submit_many([BoundCall((n, 0.3), {}) for n in range(first, first + 8)])
        killers.append(await poison.submit())
    ended = [asyncio.ensure_future(handle.outcome()) for handle in [*innocents, *killers]]
    await keep_alive(fleet, lambda: all(future.done() for future in ended), workers=2)
    for killer in killers:
        with pytest.raises(TaskFailed, match="died"):
            await killer.result(timeout=1)
    assert [await handle.result(timeout=1) for handle in innocents] == list(range(40))
    assert len(fleet.executions("poison")) <= 15
    assert {letter.message.task for letter in await producer.dead_letters() if letter.message} == {"poison"}


async def test_while_suspects_run_alone_the_others_go_on(fleet: Fleet, producer: Mesh) -> None:
    work = producer.get_task("work")
    suspects = await work.submit_many([BoundCall((n, 2.0), {}) for n in range(6)])
    poison = await producer.get_task("poison").submit()
    waiting = [asyncio.ensure_future(handle.outcome()) for handle in [poison, *suspects]]
    until = lambda: all(future.done() for future in waiting)  # noqa: E731
    keeping = asyncio.create_task(keep_alive(fleet, until, CONCURRENCY="20"))
    await wait_until(lambda: killed(fleet) == 2 and len(fleet.executions("work")) > 12, timeout=30)
    began = time.monotonic()
    others = await work.submit_many(range(100, 200))
    assert [await handle.result(timeout=5) for handle in others] == list(range(100, 200))
    assert time.monotonic() - began < 2.0
    assert not until()
    await keeping
    assert [await handle.result(timeout=1) for handle in suspects] == list(range(6))


@pytest.mark.parametrize(("prefix", "why"), [("hidden_", "HIDDEN"), ("", "UNLOADABLE")])
async def test_where_no_process_can_import_the_handler_suspects_run_one_at_a_time(
    fleet: Fleet, producer: Mesh, prefix: str, why: str
) -> None:
    work = producer.get_task(f"{prefix}work")
    neighbours = await work.submit_many([BoundCall((n, 0.5), {}) for n in range(8)])
    poison = await producer.get_task(f"{prefix}poison").submit()
    ended = [asyncio.ensure_future(handle.outcome()) for handle in [poison, *neighbours]]
    await keep_alive(fleet, lambda: all(future.done() for future in ended), workers=2, **{why: "1"})
    with pytest.raises(TaskFailed, match="3 workers died"):
        await poison.result(timeout=1)
    assert [await handle.result(timeout=1) for handle in neighbours] == list(range(8))
    assert killed(fleet) == 3
