"""The tasks of a schedule: their handlers do what the message's plan says, and tell the model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from taskmesh import Context, Mesh, Retry
from taskmesh.broker import scripts
from taskmesh.broker.scripts import Script

if TYPE_CHECKING:
    from tests.schedules.world import Process

INLINE_LIMIT = 400
PAD = "x" * 500
SCRIPT_NAMES = {
    key: script.name
    for script in vars(scripts).values()
    if isinstance(script, Script)
    for key in (script.sha, script.source)
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "retried": {"retry": Retry(attempts=3, delay=0.3, jitter=0.0)},
    "fragile": {"max_deliveries": 1},
    "timed": {"timeout": 0.5},
}
KINDS = tuple(OPTIONS)


def attempts_of(kind: str) -> int:
    retry: Retry | None = OPTIONS[kind].get("retry")
    return 1 if retry is None else retry.attempts


def deaths_of(kind: str) -> int:
    """So many deaths of workers condemn a message."""
    return int(OPTIONS[kind].get("max_deliveries", 3))


def register(mesh: Mesh, process: Process, kinds: tuple[str, ...]) -> dict[str, Any]:
    """The tasks by name, for one process."""

    async def work(ctx: Context, n: int, pad: str = "") -> str:
        return await run(process, ctx, n)

    return {kind: mesh.task(name=kind, **OPTIONS[kind])(work) for kind in kinds}


async def run(process: Process, ctx: Context, n: int) -> str:
    """A handler's run."""
    world = process.world
    if process.has_ended:
        return ""
    plan = world.model.messages[n].plan
    run = world.model.started(process.name, ctx, n)
    world.note(process.name, f"starts {n} (attempt {ctx.attempt}, delivery {ctx.deliveries}) as {ctx.worker}")
    try:
        if plan.work == "sleep":
            await asyncio.sleep(plan.seconds)
        elif plan.work == "block":
            if not world.is_healed:
                process.block(plan.seconds)
            await asyncio.sleep(0)
        elif plan.work == "gate" and not world.is_healed:
            gate = asyncio.get_running_loop().create_future()
            world.model.gates.append(gate)
            await gate
        if ctx.attempt <= plan.failures:
            run.state = "raised"
            world.note(process.name, f"raises {n}")
            raise ValueError(n)
    except asyncio.CancelledError:
        run.state = "cancelled"
        world.note(process.name, f"is cancelled: {n}")
        raise
    run.state = "returned"
    world.note(process.name, f"returns {n}")
    return f"{n}/{ctx.attempt}"
