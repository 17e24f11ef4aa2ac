"""Real servers for every test: a private one for the whole session, emptied before each test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import redis

from taskmesh import Mesh, MeshSettings
from taskmesh.testing import RedisServer

LIVENESS_TTL = 1.0


@pytest.fixture(scope="session")
def server() -> Iterator[RedisServer]:
    """One Redis for the session."""
    with RedisServer() as running:
        yield running


@pytest.fixture
def redis_url(server: RedisServer) -> str:
    """The session's server, emptied."""
    server.command("FLUSHALL")
    return server.url


@pytest.fixture
def plain(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client, for looking at keys."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


MakeMesh = Callable[..., Mesh]


def settings_for_tests(url: str | None, **changes: Any) -> MeshSettings:
    return MeshSettings(**{"url": url, "liveness_ttl": LIVENESS_TTL, **changes})


@pytest.fixture
def make_mesh(redis_url: str) -> MakeMesh:
    """Makes a Mesh on the session's server. Keywords that are settings go there, the rest to Mesh."""

    def make(name: str = "test", **arguments: Any) -> Mesh:
        fields = MeshSettings.__dataclass_fields__
        changes = {key: arguments.pop(key) for key in list(arguments) if key in fields}
        return Mesh(name, settings=settings_for_tests(changes.pop("url", redis_url), **changes), **arguments)

    return make


@pytest.fixture
async def mesh(make_mesh: MakeMesh) -> AsyncIterator[Mesh]:
    """A Mesh that is connected for the whole test."""
    async with make_mesh() as made:
        yield made


@pytest.fixture
def free_server() -> Iterator[RedisServer]:
    """A server of this test's own, with AOF, to be killed and started again."""
    with RedisServer(aof=True) as running:
        yield running
