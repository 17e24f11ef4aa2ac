"""``taskmesh queues``, ``taskmesh workers`` and ``taskmesh top``: the state of a Mesh."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from typing import Annotated

import msgspec
import typer

from taskmesh.app.mesh import Mesh
from taskmesh.cli.console import duration, table
from taskmesh.cli.loading import load_mesh
from taskmesh.cli.state import App, Json
from taskmesh.monitoring.snapshot import snapshot
from taskmesh.monitoring.status import MeshSnapshot


def queues(app: App, as_json: Json = False) -> None:
    """What waits, runs, is delayed, dead or parked in each queue."""
    seen = _look(load_mesh(app))
    if as_json:
        rows = [
            {**msgspec.to_builtins(queue), "waiting": queue.waiting, "pending": queue.pending}
            for queue in seen.queues
        ]
        typer.echo(msgspec.json.encode(rows).decode())
        return
    titles = ("QUEUE", "WAITING", "PENDING", "DELAYED", "DEAD", "PARKED", "OLDEST")
    typer.echo(
        table(
            titles,
            [
                (q.name, q.waiting, q.pending, q.delayed, q.dead, q.parked, duration(q.oldest_age))
                for q in seen.queues
            ],
        )
    )


def workers(app: App, as_json: Json = False) -> None:
    """The workers that have entered and not left, and how many messages each holds."""
    seen = _look(load_mesh(app))
    if as_json:
        typer.echo(msgspec.json.encode(seen.workers).decode())
        return
    rows = [
        (
            worker.name,
            "alive" if worker.is_alive else "lost",
            worker.holds,
            duration(worker.last_seen_age),
            ", ".join(worker.queues),
        )
        for worker in seen.workers
    ]
    typer.echo(table(("WORKER", "STATE", "HOLDS", "LAST SEEN", "QUEUES"), rows))


def top(
    app: App,
    interval: Annotated[float, typer.Option("--interval", min=0.1, help="Seconds between two looks.")] = 1.0,
) -> None:
    """Watch a Mesh in the terminal until Ctrl-C."""
    watch = importlib.import_module("taskmesh.monitoring.terminal").watch
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(watch(load_mesh(app), interval))


def _look(mesh: Mesh) -> MeshSnapshot:
    async def look() -> MeshSnapshot:
        async with mesh:
            return await snapshot(mesh)

    return asyncio.run(look())
