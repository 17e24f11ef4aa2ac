"""Fixtures of the fault tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from taskmesh import Mesh
from taskmesh.testing import Proxy, RedisServer
from tests.integration.fault_fleet import Fleet, client_of


@pytest.fixture
def fleet(redis_url: str, tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(redis_url, tmp_path / "ledger")
    yield made
    made.end()


@pytest.fixture
async def producer(redis_url: str) -> AsyncIterator[Mesh]:
    """The submitting side: the same tasks, no worker."""
    async with client_of(redis_url) as mesh:
        yield mesh


@pytest.fixture
async def proxy(server: RedisServer, redis_url: str) -> AsyncIterator[Proxy]:
    async with Proxy(server.port) as made:
        yield made
