"""Programs that type checkers accept: a task is typed as its function is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_type

from taskmesh import Batch, Context, Handle, Mesh, Retry

mesh = Mesh("typed")


@mesh.task
async def add(a: int, b: int = 0) -> int:
    return a + b


@mesh.task(queue="mail", retry=Retry(attempts=5), timeout=30)
async def send(ctx: Context, to: str) -> bool:
    return ctx.attempt > 1 and bool(to)


@mesh.task
def plain(text: str) -> list[str]:
    return text.split()


@mesh.task(name="sized")
def plain_with_context(ctx: Context, text: str) -> int:
    return len(text) + ctx.attempt


@mesh.task(batch=Batch(max_rows=8))
async def embed(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


@mesh.task(batch=Batch(max_rows=8))
def invert(numbers: list[float]) -> Sequence[float | Exception]:
    return [1 / number if number else ZeroDivisionError() for number in numbers]


async def use() -> None:
    handle = await add.submit(1, b=2)
    assert_type(handle, Handle[int])
    assert_type(await handle.result(timeout=5), int)
    assert_type(await add(1, 2), int)
    assert_type(await (await send.submit("a@b.c")).result(), bool)
    assert_type(await (await send.submit_in(5.0, to="a@b.c")).result(), bool)
    assert_type(await send("a@b.c"), bool)
    assert_type(await (await plain.submit("a b")).result(), list[str])
    assert_type(await (await plain_with_context.submit("a b")).result(), int)
    assert_type(await (await embed.submit("one")).result(), float)
    assert_type(await (await invert.submit(2.0)).result(), float)
    assert_type(await invert(2.0), float)
    for each in await add.submit_many([add.bind(1, 2), add.bind(3)]):
        assert_type(await each.result(), int)
    async for done in plain.map(["a", "b"]):
        assert_type(await done.result(), list[str])
    async with mesh.worker() as worker:
        await worker.stop(1.0)


@mesh.task
async def take(thing: object, times: int = 1) -> int:
    return times


@mesh.task(queue="any")
def take_any(thing: Any) -> str:
    return str(thing)


async def use_what_takes_anything() -> None:
    assert_type(await (await take.submit("x", times=2)).result(), int)
    await take_any.submit(5)  # what it returns is not known: with Any, several overloads match
