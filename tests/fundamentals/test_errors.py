"""Failures: the submitter sees the remote exception, with its traceback."""

from __future__ import annotations

from typing import Any

import pytest

from taskmesh import ConfigurationError, Mesh, PayloadTooLarge, TaskFailed
from taskmesh.messages import Status
from tests.conftest import MakeMesh


class OutOfStock(Exception):
    def __init__(self, item: str, left: int = 0) -> None:
        super().__init__(item, left)
        self.item = item
        self.left = left


async def test_a_failed_task_raises_with_type_message_and_remote_traceback(mesh: Mesh) -> None:
    @mesh.task
    async def divide(a: int, b: int) -> float:
        return a / b

    async with mesh.worker():
        with pytest.raises(TaskFailed) as failed:
            await (await divide.submit(1, 0)).result(timeout=5)
    assert failed.value.type == "ZeroDivisionError"
    assert failed.value.message == "division by zero"
    assert "return a / b" in failed.value.traceback
    assert "taskmesh/worker" not in failed.value.traceback  # only the handler's own frames


async def test_registered_exceptions_are_raised_as_themselves(mesh: Mesh) -> None:
    @mesh.task(raises=(OutOfStock, KeyError))
    async def buy(item: str) -> None:
        if item == "tea":
            raise OutOfStock(item, left=3)
        raise KeyError(item)

    async with mesh.worker():
        with pytest.raises(OutOfStock) as sold_out:
            await (await buy.submit("tea")).result(timeout=5)
        assert (sold_out.value.item, sold_out.value.left) == ("tea", 3)
        assert isinstance(sold_out.value.__cause__, TaskFailed)  # with the remote traceback
        with pytest.raises(KeyError, match="soap"):
            await (await buy.submit("soap")).result(timeout=5)


async def test_others_are_not_imported_because_a_message_names_them(mesh: Mesh) -> None:
    @mesh.task
    async def buy(item: str) -> None:
        raise OutOfStock(item)

    async with mesh.worker():
        with pytest.raises(TaskFailed, match="OutOfStock"):
            await (await buy.submit("tea")).result(timeout=5)


async def test_an_outcome_tells_the_end_without_raising(mesh: Mesh) -> None:
    @mesh.task
    async def fragile(works: bool) -> int:
        if not works:
            raise ValueError("broken")
        return 1

    async with mesh.worker():
        good = await (await fragile.submit(True)).outcome(timeout=5)
        bad = await (await fragile.submit(False)).outcome(timeout=5)
    assert (good.status, good.value) == (Status.SUCCEEDED, 1)
    assert bad.status is Status.FAILED
    assert bad.failure is not None
    assert bad.failure.message == "broken"


@pytest.mark.parametrize("in_thread", [False, True])
async def test_no_exception_wedges_the_worker(mesh: Mesh, in_thread: bool) -> None:
    class Nameless(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no text")

    raised: list[type[BaseException]] = [StopIteration, SystemExit, Nameless, GeneratorExit, TimeoutError]

    def fail(index: int) -> None:
        raise raised[index]()

    async def fail_async(index: int) -> None:
        fail(index)

    task: Any = mesh.task(fail if in_thread else fail_async)

    @mesh.task
    async def fine() -> str:
        return "fine"

    async with mesh.worker():
        for index in range(len(raised)):
            with pytest.raises(TaskFailed):
                await (await task.submit(index)).result(timeout=5)
        assert await (await fine.submit()).result(timeout=5) == "fine"


async def test_a_call_over_the_size_limit_is_refused_at_submit(make_mesh: MakeMesh) -> None:
    mesh = make_mesh(inline_limit_bytes=1000, max_payload_bytes=10_000)

    @mesh.task
    async def take(data: bytes) -> bytes:
        return data * 100

    async with mesh, mesh.worker():
        with pytest.raises(PayloadTooLarge, match="max_payload_bytes"):
            await take.submit(b"x" * 20_000)
        with pytest.raises(TaskFailed, match="PayloadTooLarge"):  # and a result over it fails the task
            await (await take.submit(b"x" * 500)).result(timeout=5)


async def test_the_observer_of_a_failing_observer_is_not_disturbed(mesh: Mesh) -> None:
    class Broken:
        def on_event(self, event: object) -> None:
            raise RuntimeError("broken observer")

    mesh.observers.add(Broken())

    @mesh.task
    async def one() -> int:
        return 1

    async with mesh.worker():
        assert await (await one.submit()).result(timeout=5) == 1


async def test_options_that_do_not_exist_are_named_beside_those_that_do(make_mesh: MakeMesh) -> None:
    mesh = make_mesh()
    with pytest.raises(ConfigurationError, match=r"no option 'queu'; there are: name, queue"):
        mesh.task(queu="mail")  # type: ignore[call-overload]

    @mesh.task
    async def send() -> None: ...

    with pytest.raises(ConfigurationError, match=r"'priorty' cannot be changed .* priority"):
        send.options(priorty=1)  # type: ignore[call-arg]
