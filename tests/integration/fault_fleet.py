"""Worker processes that faults are tried on, and the client that submits to them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import redis

from taskmesh import Mesh
from taskmesh.keys import RETURNED
from tests.conftest import settings_for_tests

TTL = 0.6
PROGRAM = Path(__file__).with_name("fault_worker.py")
PREFIX = "taskmesh:{faults:default:0}:"


class Fleet:
    """Worker processes over one server, and their ledger."""

    def __init__(self, url: str, ledger: Path) -> None:
        self._ledger = ledger
        self._environment = {
            **os.environ,
            "TASKMESH_URL": url,
            "TASKMESH_LIVENESS_TTL": str(TTL),
            "LEDGER": str(ledger),
        }
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, **environment: str) -> subprocess.Popen[bytes]:
        """Start a worker; returns when it serves."""
        process = self.launch(**environment)
        self.await_ready(process)
        return process

    def launch(self, **environment: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            env={**self._environment, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)
        return process

    def await_ready(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"

    def executions(self, task: str = "work") -> list[list[str]]:
        """The ledger's lines of a task: [number, pid, deliveries]."""
        lines = self._ledger.read_text().splitlines() if self._ledger.exists() else []
        return [words[1:] for line in lines if (words := line.split())[0] == task]

    def times(self) -> Counter[int]:
        """How often each number was executed."""
        return Counter(int(number) for number, _, _ in self.executions())

    def end(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGCONT)
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def client_of(url: str, **changes: Any) -> Mesh:
    mesh = Mesh("faults", settings=settings_for_tests(url, liveness_ttl=TTL, **changes))

    @mesh.task
    async def work(n: int, seconds: float = 0.0) -> int:
        return n

    @mesh.task
    async def who(seconds: float) -> int:
        return 0

    @mesh.task
    async def poison() -> None: ...

    @mesh.task
    async def hidden_work(n: int, seconds: float = 0.0) -> int:
        return n

    @mesh.task
    async def hidden_poison() -> None: ...

    return mesh


def held_by(plain: redis.Redis, lane: str) -> dict[bytes, int]:
    """How many entries of a task stream each worker holds."""
    rows = plain.xpending(lane, "workers")["consumers"]
    return {row["name"]: row["pending"] for row in rows if row["name"] != RETURNED}
