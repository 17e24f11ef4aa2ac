"""A server for schedules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from taskmesh.testing import RedisServer
from tests.schedules.node import Backend, new_server


@pytest.fixture(scope="package")
def schedule_server() -> Iterator[RedisServer]:
    """A server that only schedules use."""
    with new_server() as server:
        yield server


@pytest.fixture(scope="package")
def backend(schedule_server: RedisServer) -> Iterator[Backend]:
    """The way to it."""
    backend = Backend(schedule_server.port)
    yield backend
    backend.close()
