"""The processes of a run: masters and workers around two servers, a durable one and one for bulk values."""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.training.lines import Program
from benchmarks.training.plan import SLOWNESS, Plan, encode
from benchmarks.training.servers import Servers

WORKER = ("-m", "taskmesh", "worker", "benchmarks.training.app:mesh", "--log-level", "warning", "-c")
MASTER = ("-m", "benchmarks.training.master")
DRAIN = 5.0
TTL = 10.0


def step_seconds(master: Program, steps: int) -> list[float]:
    """How long each step of a run lasted, from commit to commit; the first is not among them."""
    commits = [float(master.until("commit")["at"]) for _ in range(steps)]
    master.until("finished")
    return [later - earlier for earlier, later in itertools.pairwise(commits)]


class Fleet:
    """Starts a plan's processes; all of them have ended when the block is left.

    Args:
        urls: of the servers.
        ttl: liveness TTL of the workers, lease of the masters.
    """

    def __init__(self, plan: Plan, urls: Servers, ttl: float = TTL) -> None:
        self._told = {
            **encode(plan),
            "TASKMESH_URL": urls.durable,
            "TASKMESH_BULK_URL": urls.bulk,
            "TASKMESH_LIVENESS_TTL": str(ttl),
        }
        self._folder = tempfile.TemporaryDirectory(prefix="bench-training-")
        self._programs: list[Program] = []

    def __enter__(self) -> Self:
        return self

    def worker(self, concurrency: int = 1, slowness: float = 1.0, prefix: Sequence[str] = ()) -> Program:
        """One worker process; ``prefix`` goes before the command."""
        command = [*prefix, sys.executable, *WORKER, str(concurrency)]
        return self._start("worker", command, {SLOWNESS: str(slowness)})

    def master(self, prefix: Sequence[str] = ()) -> Program:
        """One process that runs the plan, or waits for the lease."""
        return self._start("master", [*prefix, sys.executable, *MASTER], {})

    def _start(self, kind: str, command: Sequence[str], told: dict[str, str]) -> Program:
        log = Path(self._folder.name, f"{kind}-{len(self._programs)}.log")
        self._programs.append(Program(command, {**self._told, **told}, log))
        return self._programs[-1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for program in self._programs:
            program.ask_to_stop()
        for program in self._programs:
            program.end(DRAIN if kind is None else 0.5)
        self._folder.cleanup()
