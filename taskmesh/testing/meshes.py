"""What the pytest fixtures do: they point a Mesh, an application's own or a new one, at the test server."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from taskmesh.app.mesh import Mesh
from taskmesh.broker.link import Argument
from taskmesh.errors import ConfigurationError
from taskmesh.settings import MeshSettings, WorkerSettings
from taskmesh.testing.clock import MovableClock
from taskmesh.testing.faults import Fault
from taskmesh.testing.wait import wait_until
from taskmesh.worker.runtime import Worker

LIVENESS_TTL = 1.0
DRAIN_TIMEOUT = 5.0

Connect = Callable[[Mesh], AbstractAsyncContextManager[Mesh]]
Run = Callable[..., AbstractAsyncContextManager[Worker]]
MakeMesh = Callable[..., Mesh]
FailAt = Callable[..., Fault]
Idle = Callable[..., Awaitable[None]]


def settings_for(url: str | None, **changes: Any) -> MeshSettings:
    """Settings of a test's Meshes: a dead worker is found within a second."""
    return MeshSettings(**{"url": url, "liveness_ttl": LIVENESS_TTL, **changes})


@asynccontextmanager
async def connected(mesh: Mesh, settings: MeshSettings, clock: MovableClock) -> AsyncIterator[Mesh]:
    """``mesh`` with the server of ``settings`` and with that clock, for as long as the block runs.

    Its server, liveness TTL and durability are the test's; all else stays as the application has it.

    Raises:
        ConfigurationError: it is connected to another server.
    """
    own = mesh.settings, mesh.clock
    wanted = dataclasses.replace(
        mesh.settings,
        url=settings.url,
        bulk_url=settings.bulk_url,
        liveness_ttl=settings.liveness_ttl,
        durability=settings.durability,
    )
    if mesh.is_connected and own != (wanted, clock):
        raise ConfigurationError(
            f"{mesh} is connected already: connect it inside the test, with taskmesh_connect or taskmesh_run"
        )
    mesh.settings, mesh.clock = wanted, clock
    try:
        async with mesh:
            yield mesh
    finally:
        if not mesh.is_connected:
            mesh.settings, mesh.clock = own


def connector(settings: MeshSettings, clock: MovableClock) -> Connect:
    def connect(mesh: Mesh) -> AbstractAsyncContextManager[Mesh]:
        """``mesh`` on the test server."""
        return connected(mesh, settings, clock)

    return connect


def runner(settings: MeshSettings, clock: MovableClock) -> Run:
    @asynccontextmanager
    async def run(mesh: Mesh, worker_settings: WorkerSettings | None = None) -> AsyncIterator[Worker]:
        """``mesh`` on the test server with a worker, which drains at the end: within 5 s, or as its settings say."""
        async with (
            connected(mesh, settings, clock),
            mesh.worker(worker_settings or WorkerSettings(drain_timeout=DRAIN_TIMEOUT)) as worker,
        ):
            yield worker

    return run


async def idle(mesh: Mesh, timeout: float = 10.0) -> None:
    """Return when nothing of the Mesh waits, runs or is due: all has ended, or waits for a later time.

    Raises:
        AssertionError: something still does after ``timeout`` seconds.
    """

    async def is_idle() -> bool:
        return not any(await _open_work(mesh))

    await wait_until(is_idle, timeout, f"{mesh} has nothing to do")


async def _open_work(mesh: Mesh) -> list[int]:
    """Counts of messages that are not settled or are due, by stream."""
    caller = mesh.client.caller
    seconds, micros = await caller.command(b"time", "TIME")
    now_ms = int(seconds) * 1000 + int(micros) // 1000 + mesh.clock.offset_ms
    requests: list[tuple[bytes, tuple[Argument, ...]]] = []
    for queue in mesh.registry.queues:
        for keys in (partition.keys for partition in mesh.client.partitions(queue)):
            requests += [(keys.tag, ("XLEN", lane)) for lane in keys.lanes]
            requests.append((keys.tag, ("ZCOUNT", keys.delayed, "-inf", now_ms)))
    return await caller.read_many(requests)


def maker(settings: MeshSettings, clock: MovableClock) -> MakeMesh:
    fields = {field.name for field in dataclasses.fields(MeshSettings)}

    def make(name: str = "test", **arguments: Any) -> Mesh:
        """A new Mesh on the test server. Keywords that are settings go there, the others to ``Mesh``."""
        changes = {key: arguments.pop(key) for key in list(arguments) if key in fields}
        return Mesh(
            name, **{"settings": dataclasses.replace(settings, **changes), "clock": clock, **arguments}
        )

    return make
