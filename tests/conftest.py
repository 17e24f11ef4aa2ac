"""Real servers for every test: the fixtures of the pytest plugin that users have, under shorter names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis

from taskmesh import Mesh
from taskmesh.testing import RedisServer
from taskmesh.testing.meshes import LIVENESS_TTL, MakeMesh
from taskmesh.testing.meshes import settings_for as settings_for_tests

__all__ = ["LIVENESS_TTL", "MakeMesh", "settings_for_tests"]


@pytest.fixture(scope="session")
def server(taskmesh_server: RedisServer) -> RedisServer:
    """One Redis for the session."""
    return taskmesh_server


@pytest.fixture
def redis_url(taskmesh_url: str) -> str:
    """The session's server, emptied."""
    return taskmesh_url


@pytest.fixture
def plain(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client, for looking at keys."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def make_mesh(taskmesh_mesh: MakeMesh) -> MakeMesh:
    """Makes a Mesh on the session's server. Keywords that are settings go there, the rest to Mesh."""
    return taskmesh_mesh


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
