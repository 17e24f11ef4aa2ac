"""The servers of a run: a durable one and one for bulk values, on this machine or on one side of a slow link."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import redis

from benchmarks.processes import SideFailed
from benchmarks.servers import free_port, server_binary
from taskmesh.broker.embedded_guard import ALLOCATOR

START_LIMIT = 10.0
STOP_LIMIT = 10.0


class Servers(NamedTuple):
    """The addresses of two servers: ``durable`` has an append-only file, ``bulk`` has none."""

    durable: str
    bulk: str


class _Addresses(NamedTuple):
    tcp: str
    unix: str


@contextmanager
def _server(
    persistent: bool, address: str, prefix: Sequence[str], environment: Mapping[str, str]
) -> Iterator[_Addresses]:
    """One server; it answers, and has ended when the block is left."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        path = Path(folder, "socket")
        options = {
            "port": port, "bind": address, "unixsocket": path, "dir": folder, "save": "", "protected-mode": "no",
            "loglevel": "warning", "appendonly": "yes" if persistent else "no", "appendfsync": "everysec",
        }  # fmt: skip
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        process = subprocess.Popen(
            [*prefix, server_binary(), *arguments],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        try:
            _await_server(path, process)
            yield _Addresses(f"redis://{address}:{port}/0", f"unix://{path}")
        finally:
            process.terminate()
            try:
                process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_server(path: Path, process: subprocess.Popen[bytes]) -> None:
    give_up_at = time.monotonic() + START_LIMIT
    with redis.Redis(unix_socket_path=str(path)) as client:
        while process.poll() is None and time.monotonic() < give_up_at:
            try:
                client.ping()
                return
            except redis.ConnectionError:
                time.sleep(0.02)
    raise SideFailed("a server did not start")


@contextmanager
def servers(
    *, tcp: bool = False, address: str = "127.0.0.1", prefix: Sequence[str] = ()
) -> Iterator[Servers]:
    """Both, for as long as the block runs.

    Args:
        tcp: whether they are reached so, and are as they come; else over unix sockets and with the allocator's
            settings, as those that taskmesh starts by itself.
        address: that they listen at.
        prefix: what goes before their commands.
    """
    environment = {} if tcp else ALLOCATOR
    with (
        _server(True, address, prefix, environment) as durable,
        _server(False, address, prefix, environment) as bulk,
    ):
        yield Servers(durable.tcp, bulk.tcp) if tcp else Servers(durable.unix, bulk.unix)
