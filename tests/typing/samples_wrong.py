"""Each marked line is an error to a type checker; the test sees that every one of them is, and no other."""

from __future__ import annotations

from taskmesh import Batch, Context, Mesh

mesh = Mesh("typed")


@mesh.task
async def add(a: int, b: int = 0) -> int:
    return a + b


@mesh.task(queue="mail")
async def send(ctx: Context, to: str) -> bool:
    return bool(to)


@mesh.task(batch=Batch(max_rows=8))
async def embed(texts: list[str]) -> list[float]:
    return [float(len(text)) for text in texts]


async def use() -> None:
    await add.submit("one")  # wrong: arg-type
    await add.submit()  # wrong: call-arg
    await add.submit(1, 2, 3)  # wrong: call-arg
    await add.submit(1, c=2)  # wrong: call-arg
    await add("one")  # wrong: arg-type
    await send.submit(Context, "a@b.c")  # wrong: call-arg arg-type
    await send.submit_in("soon", "a@b.c")  # wrong: arg-type
    await embed.submit(["a", "b"])  # wrong: arg-type
    text: str = await (await add.submit(1)).result()  # wrong: assignment
    print(text)
    add.bind("one")  # wrong: arg-type
    add.options(retries=3)  # wrong: call-arg


@mesh.task(batch=Batch(), queue=5)  # wrong: call-overload untyped-decorator
async def wrong_option(rows: list[int]) -> list[int]:
    return rows
