"""The command line as users run it: real processes, in a folder with an app of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from taskmesh.testing import wait_until

ROOT = Path(__file__).parents[2]

APP = """
import asyncio, os, time
from taskmesh import Context, Mesh

mesh = Mesh("shop")

@mesh.task
async def add(a: int, b: int) -> int:
    return a + b

@mesh.task
async def work(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"

@mesh.task
async def block(seconds: float) -> str:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"

@mesh.task
async def fatal() -> None:
    os._exit(3)

@mesh.task
async def modules() -> list[str]:
    import sys
    return sorted({name.partition(".")[0] for name in sys.modules})

@mesh.task(queue="mail")
async def fail(text: str) -> None:
    raise ValueError(text)

not_a_mesh = 42
"""


class Program:
    """A ``taskmesh`` process under way; its stderr is collected as it comes."""

    def __init__(self, arguments: list[str], folder: Path, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "taskmesh.cli.main", *arguments],
            cwd=folder,
            env=environment(url),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._lines.append(line)

    @property
    def text(self) -> str:
        """What it has said on stderr so far."""
        return "".join(self._lines)

    async def says(self, part: str, times: int = 1, timeout: float = 20.0) -> None:
        """Wait until it has said so, so often."""
        await wait_until(lambda: self.text.count(part) >= times, timeout, f"{part!r} in:\n{self.text}")

    async def ends(self, timeout: float = 20.0) -> int:
        """Wait for its end; returns its exit code."""
        await wait_until(lambda: self.process.poll() is not None, timeout, f"its end:\n{self.text}")
        self._reader.join(5.0)
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(5.0)
        assert self.process.stderr is not None
        self.process.stderr.close()


def environment(url: str) -> dict[str, str]:
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "TASKMESH_URL": url,
        "TASKMESH_LIVENESS_TTL": "1",
    }


def taskmesh(*arguments: str, folder: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(
        [sys.executable, "-m", "taskmesh.cli.main", *arguments],
        cwd=folder,
        env=environment(url),
        capture_output=True,
        text=True,
        timeout=60,
    )


def children(pid: int) -> list[int]:
    """The processes that this one has started and that still run."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(word) for word in listed]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no resident size of process {pid}")


def is_settled(client: redis.Redis, queue: str = "default") -> bool:
    """Whether nothing waits or runs in a queue of the shop."""
    return int(client.xlen(f"taskmesh:{{shop:{queue}:0}}:tasks:normal")) == 0


@contextmanager
def old_server(version: str) -> Iterator[str]:
    """Something that says it is a Redis of this version; yields its URL."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    def answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                if b"INFO\r\n" in data and b"SETINFO" not in data:
                    text = f"# Server\r\nredis_version:{version}\r\nredis_mode:standalone\r\n"
                    connection.sendall(f"${len(text)}\r\n{text}\r\n".encode())
                else:
                    connection.sendall(b"+OK\r\n" * max(1, data.count(b"*")))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5.0)
