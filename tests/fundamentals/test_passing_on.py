"""A handler may let another worker, by name, have a message."""

from __future__ import annotations

import asyncio
from collections import Counter

import redis

from taskmesh import Context, Mesh
from tests.conftest import MakeMesh


def serve(mesh: Mesh, holder: dict[int, str], ran: list[tuple[str, int, int]]) -> None:
    @mesh.task
    async def add(number: int, context: Context) -> str:
        wanted = holder.setdefault(number, context.worker)
        if wanted != context.worker:
            context.pass_to(wanted)
        ran.append((context.worker, context.attempt, context.deliveries))
        return context.worker


async def test_a_message_ends_with_the_worker_that_it_was_passed_to(make_mesh: MakeMesh) -> None:
    holder: dict[int, str] = {}
    ran: list[tuple[str, int, int]] = []
    meshes = [make_mesh() for _ in range(3)]
    for mesh in meshes:
        serve(mesh, holder, ran)
    first, second, third = meshes
    async with first, second, third, first.worker() as one, second.worker() as two:
        names = [one.worker.decode(), two.worker.decode()]
        for round_ in range(5):
            holder |= {number: names[number % 2] for number in range(40)}
            handles = await third.get_task("add").submit_many(range(40))
            found = [await handle.result(timeout=10) for handle in handles]
            assert found == [names[number % 2] for number in range(40)], round_
    assert len(ran) == 200
    assert {attempt for _, attempt, _ in ran} == {1}
    assert {deliveries for _, _, deliveries in ran} == {1}, "it is no death"


async def test_a_message_for_a_worker_that_is_gone_goes_to_whoever_is_free(
    make_mesh: MakeMesh, plain: redis.Redis
) -> None:
    mesh = make_mesh()
    tries: Counter[int] = Counter()

    @mesh.task
    async def work(number: int, context: Context) -> int:
        tries[number] += 1
        if tries[number] < 3:
            context.pass_to("nobody-1" if number else context.worker)
        return context.attempt

    async with mesh, mesh.worker():
        handles = await work.submit_many([0, 1])
        assert [await handle.result(timeout=10) for handle in handles] == [1, 1]
    assert tries == {0: 3, 1: 3}
    assert not plain.keys("*delayed*")


async def test_a_thread_may_pass_on_too(make_mesh: MakeMesh) -> None:
    meshes = [make_mesh(), make_mesh()]
    names: list[str] = []
    for mesh in meshes:

        @mesh.task(name="work")
        def work(context: Context) -> str:
            if context.worker != names[0]:
                context.pass_to(names[0])
            return context.worker

    one, two = meshes
    async with one, two, one.worker() as first, two.worker():
        names.append(first.worker.decode())
        handles = [await one.get_task("work").submit() for _ in range(20)]
        assert {await handle.result(timeout=10) for handle in handles} == {names[0]}


async def test_a_worker_that_dies_with_what_was_passed_to_it_loses_nothing(make_mesh: MakeMesh) -> None:
    first, second = make_mesh(liveness_ttl=1.0), make_mesh(liveness_ttl=1.0)
    holder: dict[str, str] = {}
    started = asyncio.Event()

    async def work(context: Context) -> str:
        if holder["name"] not in (context.worker, "anyone"):
            context.pass_to(holder["name"])
        if holder["name"] == context.worker:
            started.set()
            await asyncio.Event().wait()
        return context.worker

    for mesh in (first, second):
        mesh.task(work)
    async with first, second, first.worker() as one, second.worker() as two:
        holder["name"] = two.worker.decode()
        handle = await first.get_task("work").submit()
        await asyncio.wait_for(started.wait(), 10)
        holder["name"] = "anyone"
        two.abandon()
        assert await handle.result(timeout=20) == one.worker.decode()
