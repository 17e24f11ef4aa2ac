"""The small terminal view of a Mesh. Needs rich, which nothing else in the engine does."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from taskmesh.errors import BrokerError
from taskmesh.monitoring.snapshot import EnterableMesh, snapshot
from taskmesh.monitoring.status import MeshSnapshot

MIB = 1024 * 1024
LONGEST_LIST = 20


def render(seen: MeshSnapshot, before: MeshSnapshot | None = None) -> RenderableType:
    """A snapshot as tables; with the one before it, how fast each queue's backlog grows."""
    parts: list[RenderableType] = [_headline(seen), _queues(seen, before), _workers(seen)]
    if seen.runs:
        parts.append(_runs(seen))
    return Group(*parts)


async def watch(mesh: EnterableMesh, interval: float = 1.0, console: Console | None = None) -> None:
    """Show a Mesh, looked at again every ``interval`` seconds, until cancelled.

    Raises:
        BrokerError: it cannot be reached at the start; later on that is shown, and tried again.
    """
    async with mesh:
        before, seen = None, await snapshot(mesh)
        with Live(render(seen), console=console, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval)
                try:
                    before, seen = seen, await snapshot(mesh)
                    live.update(render(seen, before), refresh=True)
                except BrokerError as error:
                    live.update(Group(Text(str(error), style="bold red"), render(seen)), refresh=True)


def _headline(seen: MeshSnapshot) -> RenderableType:
    alive = sum(worker.is_alive for worker in seen.workers)
    text = Text.assemble((seen.mesh, "bold"), f"  {alive} workers alive")
    for server in seen.servers:
        limit = f" of {server.memory_limit_bytes / MIB:.0f}" if server.memory_limit_bytes else ""
        text.append(
            f"\n{server.role} {server.name}  {server.version}  "
            f"{server.memory_used_bytes / MIB:.1f}{limit} MiB  {server.clients} clients"
        )
    return text


def _table(title: str, columns: Mapping[str, bool]) -> Table:
    """``columns`` tells of each whether it is a number."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="dim")
    for name, is_number in columns.items():
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _queues(seen: MeshSnapshot, before: MeshSnapshot | None) -> Table:
    numbers = ("waiting", "per s", "pending", "delayed", "dead", "parked", "oldest")
    table = _table("queues", {"queue": False, **dict.fromkeys(numbers, True)})
    depths = {} if before is None else {queue.name: queue.waiting for queue in before.queues}
    elapsed = 0.0 if before is None else (seen.at_ms - before.at_ms) / 1000
    for queue in seen.queues:
        growth = "-"
        if queue.name in depths and elapsed > 0:
            growth = f"{(queue.waiting - depths[queue.name]) / elapsed:+.0f}"
        age = "-" if queue.oldest_age is None else f"{queue.oldest_age:.1f} s"
        counts = (queue.waiting, growth, queue.pending, queue.delayed, queue.dead, queue.parked, age)
        table.add_row(queue.name, *map(str, counts), style="red" if queue.dead else None)
    return table


def _workers(seen: MeshSnapshot) -> Table:
    table = _table(
        "workers", {"worker": False, "state": False, "holds": True, "last seen": True, "queues": False}
    )
    for worker in seen.workers[:LONGEST_LIST]:
        state = "alive" if worker.is_alive else "lost"
        seen_ago = f"{worker.last_seen_age:.1f} s"
        style = None if worker.is_alive else "red"
        table.add_row(worker.name, state, str(worker.holds), seen_ago, ", ".join(worker.queues), style=style)
    if len(seen.workers) > LONGEST_LIST:
        table.add_row(f"and {len(seen.workers) - LONGEST_LIST} more")
    return table


def _runs(seen: MeshSnapshot) -> Table:
    table = _table("runs", {"run": False, "version": True, "step": True, "loss": True})
    for run in seen.runs:
        loss = "-" if run.loss is None else f"{run.loss:.4f}"
        table.add_row(run.name, str(run.version), str(run.step), loss)
    return table
