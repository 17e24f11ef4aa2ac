"""The master of a plan's run:  python -m benchmarks.training.master

It tells of each commit, of rollbacks and evaluations, and at the end of the parameters and of what the ledger says.
A second one waits for the lease.
"""

from __future__ import annotations

import asyncio
import time

import redis
import uvloop

from benchmarks.training.app import mesh, parameters, plan, stopwatch, trainer, work
from benchmarks.training.audit import account
from benchmarks.training.chase import Chaser
from benchmarks.training.lines import tell
from benchmarks.training.stopwatch import COMMITTED
from taskmesh.events import Checkpointed, Committed, Event
from taskmesh.monitoring.snapshot import snapshot

START_LIMIT = 120.0


class Arrived(Exception):
    """The run's validation loss is low enough."""


class Meter:
    """Bytes that the servers have received and sent so far; read while nothing goes on, between two steps."""

    def __init__(self) -> None:
        urls = {url for url in (mesh.settings.url, mesh.settings.bulk_url) if url is not None}
        self._clients = [redis.Redis.from_url(url) for url in urls]

    def read(self) -> int:
        found = [client.info("stats") for client in self._clients]
        return sum(int(one["total_net_input_bytes"]) + int(one["total_net_output_bytes"]) for one in found)


class Lead:
    """Runs the plan and tells of it."""

    def __init__(self) -> None:
        self._chaser: Chaser | None = None
        self._meter: Meter | None = None
        self._going_back: asyncio.Task[None] | None = None
        self._leads = False

    def on_event(self, event: Event) -> None:
        """The first checkpoint of a run comes before its first step."""
        if isinstance(event, Checkpointed) and not self._leads:
            self._leads = True
            tell(leads=True)

    async def run(self) -> None:
        async with mesh:
            await self._await_workers()
            self._meter = Meter() if plan.meter else None
            if plan.chase is not None:
                self._chaser = Chaser(plan.chase, work, lambda: parameters)
            tell(ready=True)
            mesh.observers.add(self)
            try:
                finished = await trainer.run(steps=plan.steps, on_commit=self._on_commit)
            except Arrived:
                return
            ledger = await account(
                await trainer.ledger(), finished.version, len(work.data), plan.shards, trainer.indices
            )
            tell(finished=finished.step, digest=finished.digest, loss=finished.loss, **ledger)

    async def _await_workers(self) -> None:
        give_up_at = time.monotonic() + START_LIMIT
        while sum(worker.is_alive for worker in (await snapshot(mesh)).workers) < plan.workers:
            if time.monotonic() > give_up_at:
                raise TimeoutError(f"not all of the {plan.workers} workers came within {START_LIMIT:g} s")
            await asyncio.sleep(0.05)

    def _on_commit(self, committed: Committed) -> None:
        if stopwatch is not None:
            stopwatch.mark(COMMITTED)
        moved = {} if self._meter is None else {"moved": self._meter.read()}
        tell(
            commit=committed.step,
            at=time.monotonic(),
            loss=committed.loss,
            uplink_bytes=committed.uplink_bytes,
            dense_bytes=committed.dense_bytes,
            **moved,
        )
        if plan.go_back is not None and committed.step == plan.go_back[0] and self._going_back is None:
            self._going_back = asyncio.create_task(self._go_back(plan.go_back[1]))
        if self._chaser is not None and self._chaser.has_arrived(committed.step):
            raise Arrived

    async def _go_back(self, step: int) -> None:
        kept = await trainer.versions()
        target = next(manifest.version for manifest in kept if manifest.step == step)
        tell(rolled_back_to=target, version=await trainer.rollback(to=target))


if __name__ == "__main__":
    uvloop.run(Lead().run())
