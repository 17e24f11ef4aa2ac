"""The topologies that the contract holds on. Each test has a Mesh name of its own: embedded servers are shared."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from taskmesh import Mesh, MeshSettings
from taskmesh.testing import RedisCluster, RedisServer
from taskmesh.testing.server import Kind, find_binary
from tests.conftest import LIVENESS_TTL

TOPOLOGIES = ["embedded", "single", "valkey", "cluster"]
_numbers = itertools.count()


@pytest.fixture(scope="session", params=TOPOLOGIES)
def topology(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MeshSettings]:
    """Settings that reach a server of each kind."""
    if request.param == "embedded":
        folder = tmp_path_factory.mktemp("embedded")
        yield MeshSettings(url=None, data_folder=Path(folder), liveness_ttl=LIVENESS_TTL)
    elif request.param == "cluster":
        with RedisCluster() as cluster:
            yield MeshSettings(url=cluster.url, liveness_ttl=LIVENESS_TTL)
    else:
        kind: Kind = "redis" if request.param == "single" else "valkey"
        if find_binary(kind) is None:
            pytest.skip(f"no {kind}-server here")
        with RedisServer(kind, aof=True) as server:
            yield MeshSettings(url=server.url, liveness_ttl=LIVENESS_TTL)


@pytest.fixture
def mesh_name() -> str:
    """A name that no other test has."""
    return f"contract-{next(_numbers)}"


@pytest.fixture
def connect(topology: MeshSettings, mesh_name: str) -> Callable[..., Mesh]:
    """Makes Meshes of one name: processes of one application, as far as the server can tell."""

    def make(**arguments: Any) -> Mesh:
        return Mesh(mesh_name, settings=topology, **arguments)

    return make
