"""The topologies that the contract holds on. Each test has a Mesh name of its own: servers are shared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from taskmesh import Mesh, MeshSettings
from taskmesh.testing import RedisCluster, RedisSentinel, RedisServer
from tests.acl import url_as
from tests.conftest import LIVENESS_TTL

CALM_MS = 10_000  # nothing is lost here: a busy machine must not look like a lost server
TOPOLOGIES: dict[str, Callable[[], RedisServer | RedisSentinel | RedisCluster]] = {
    "single": lambda: RedisServer("redis", aof=True),
    "acl": lambda: RedisServer("redis", aof=True),
    "valkey": lambda: RedisServer("valkey", aof=True),
    "sentinel": lambda: RedisSentinel(kind="redis", down_after_ms=CALM_MS, aof=True),
    "sentinel-valkey": lambda: RedisSentinel(kind="valkey", down_after_ms=CALM_MS, aof=True),
    "cluster": lambda: RedisCluster(replicas=3, kind="redis", node_timeout_ms=CALM_MS, aof=True),
    "cluster-valkey": lambda: RedisCluster(replicas=3, kind="valkey", node_timeout_ms=CALM_MS, aof=True),
}
_numbers = itertools.count()


@pytest.fixture(scope="session", params=["embedded", *TOPOLOGIES])
def topology(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshSettings]:
    """Settings that reach a server of each kind."""
    if request.param == "embedded":
        folder = tmp_path_factory.mktemp("embedded")
        yield MeshSettings(url=None, data_folder=Path(folder), liveness_ttl=LIVENESS_TTL)
        return
    try:
        servers = TOPOLOGIES[request.param]()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    with servers:
        url = servers.url
        if request.param == "acl" and isinstance(servers, RedisServer):
            url = url_as(servers, "shop", "contract-")
        yield MeshSettings(url=url, liveness_ttl=LIVENESS_TTL)


@pytest.fixture
def mesh_name() -> str:
    """A name that no other test has."""
    return f"contract-{next(_numbers)}"


@pytest.fixture
def connect(topology: MeshSettings, mesh_name: str) -> Callable[..., Mesh]:
    """Makes Meshes of one name: processes of one application, as far as the server can tell."""

    def make(application: str = "", liveness_ttl: float = LIVENESS_TTL, **arguments: Any) -> Mesh:
        settings = replace(topology, liveness_ttl=liveness_ttl)
        return Mesh(mesh_name + application, settings=settings, **arguments)

    return make
