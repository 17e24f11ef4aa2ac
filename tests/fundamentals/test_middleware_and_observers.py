"""Middleware changes what happens, observers watch it."""

from __future__ import annotations

from typing import Any

import pytest

from taskmesh import Call, Mesh, Next, Retry, TaskFailed
from taskmesh.events import Event, Fetched, Settled, Submitted
from taskmesh.testing import wait_until
from tests.conftest import MakeMesh


async def test_the_first_middleware_is_the_outermost(make_mesh: MakeMesh) -> None:
    order: list[str] = []

    def layer(name: str) -> Any:
        async def middleware(call: Call, call_next: Next) -> Any:
            order.append(f"{name} before {call.task.name}")
            try:
                return await call_next(call)
            finally:
                order.append(f"{name} after")

        return middleware

    mesh = make_mesh(middleware=[layer("outer"), layer("inner")])

    @mesh.task
    async def work() -> None:
        order.append("handler")

    async with mesh, mesh.worker():
        await (await work.submit()).result(timeout=5)
    assert order == ["outer before work", "inner before work", "handler", "inner after", "outer after"]


async def test_middleware_may_change_the_call_its_result_and_its_end(make_mesh: MakeMesh) -> None:
    async def polite(call: Call, call_next: Next) -> Any:
        if call.args[0] == "nobody":
            raise LookupError("nobody is there")
        if call.args[0] == "cached":
            return "from the cache"
        call.args = (call.args[0].title(),)
        return f"{await call_next(call)}!"

    mesh = make_mesh(middleware=[polite])

    @mesh.task
    async def greet(name: str) -> str:
        return f"hello {name}"

    async with mesh, mesh.worker():
        assert await (await greet.submit("ada")).result(timeout=5) == "hello Ada!"
        assert await (await greet.submit("cached")).result(timeout=5) == "from the cache"
        with pytest.raises(TaskFailed, match="nobody is there"):
            await (await greet.submit("nobody")).result(timeout=5)


async def test_middleware_sees_the_context(make_mesh: MakeMesh) -> None:
    seen: list[tuple[str, int, str]] = []

    async def note(call: Call, call_next: Next) -> Any:
        seen.append((call.context.task_id, call.context.attempt, call.context.queue))
        return await call_next(call)

    mesh = make_mesh(middleware=[note])

    @mesh.task(retry=Retry(attempts=2, delay=0.01), queue="mail")
    async def flaky() -> None:
        if len(seen) == 1:
            raise OSError

    async with mesh, mesh.worker():
        handle = await flaky.submit()
        await handle.result(timeout=5)
    assert seen == [(handle.id, 1, "mail"), (handle.id, 2, "mail")]


async def test_observers_hear_of_every_step(make_mesh: MakeMesh) -> None:
    class Recorder:
        def __init__(self) -> None:
            self.events: list[Event] = []

        def on_event(self, event: Event) -> None:
            self.events.append(event)

        def of(self, kind: type) -> list[Any]:
            return [event for event in self.events if isinstance(event, kind)]

    recorder = Recorder()
    mesh = make_mesh(observers=[recorder])

    @mesh.task
    async def work(fail: bool) -> None:
        if fail:
            raise ValueError

    async with mesh, mesh.worker():
        await work.submit_many([False, False, True])
        await wait_until(lambda: sum(len(event.endings) for event in recorder.of(Settled)) == 3)
    assert sum(event.messages for event in recorder.of(Submitted)) == 3
    assert sum(event.deliveries for event in recorder.of(Fetched)) == 3
    endings = [ending for event in recorder.of(Settled) for ending in event.endings]
    assert sorted(ending.status for ending in endings) == ["failed", "succeeded", "succeeded"]
    assert {ending.task for ending in endings} == {"work"}
    assert all(event.dropped == 0 for event in recorder.of(Settled))


async def test_a_worker_that_has_stopped_leaves_no_observer_behind(mesh: Mesh) -> None:
    @mesh.task
    async def work() -> None: ...

    before = len(mesh.observers._observers)
    for _ in range(3):
        async with mesh.worker():
            await (await work.submit()).result(timeout=5)
    assert len(mesh.observers._observers) == before
