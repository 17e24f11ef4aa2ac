"""The child processes of a side: producers that answer, and a worker with all that it forks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Self

from benchmarks.sides import Plan, Side

ROOT = Path(__file__).resolve().parent.parent
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SideFailed(Exception):
    """A side did not do the work; the message says what happened in a line."""


class Children:
    """Starts a side's processes against one server and one slot file; their output goes to a log."""

    def __init__(
        self,
        side: Side,
        folder: Path,
        url: str,
        slots: Path,
        plan: Plan,
        *,
        results: bool,
        ttl: float | None = None,  # ours: the liveness TTL, instead of the adapter's own
    ) -> None:
        self.side = side
        self._folder = folder
        self._log = folder / f"{side.name}.log"
        self._command = [str(side.python()), "-m", "benchmarks.peers.entry", side.name]
        self._environment = {
            **os.environ,
            "BENCH_URL": url,
            "BENCH_SLOTS": str(slots),
            "BENCH_VARIANT": plan.variant,
            "BENCH_CONCURRENCY": str(plan.concurrency),
            "BENCH_RESULTS": str(int(results)),
            "PYTHONPATH": str(ROOT),
            "PYTHONWARNINGS": "ignore",
            "PYTHONDONTWRITEBYTECODE": "1",
            "C_FORCE_ROOT": "1",  # celery's word for: being root is no reason to refuse
            **({} if ttl is None else {"BENCH_TTL": str(ttl)}),
        }

    def last_words(self) -> str:
        """The last line that the side wrote to its log."""
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return lines[-1].strip()[:200] if lines else "it said nothing"

    def ask(self, *arguments: object, timeout: float = 300.0) -> dict[str, Any]:
        """Run a producer to its end and return its answer."""
        with self._log.open("ab") as log:
            try:
                ended = subprocess.run(
                    [*self._command, *map(str, arguments)],
                    env=self._environment,
                    cwd=self._folder,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise SideFailed(f"{arguments[0]} took over {timeout:.0f} s") from None
        for line in ended.stdout.decode(errors="replace").splitlines():
            if line.startswith("RESULT "):
                answer: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
                return answer
        raise SideFailed(f"{arguments[0]} gave no answer (exit {ended.returncode}): {self.last_words()}")

    def worker(self) -> Worker:
        """Start a worker, in a session of its own so that whatever it forks can be found."""
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [*self._command, "worker"],
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        return Worker(process, self)


class Worker:
    """A running worker: its main process and every process of its session."""

    def __init__(self, process: subprocess.Popen[bytes], children: Children) -> None:
        self._process = process
        self._children = children

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def check(self) -> None:
        """Raise SideFailed if the worker has ended by itself."""
        if self._process.poll() is not None:
            words = self._children.last_words()
            raise SideFailed(f"the worker ended (exit {self._process.returncode}): {words}")

    def _processes(self) -> list[int]:
        """The ids of the session's processes, the main one among them while it runs."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    # After the name, which may hold anything, in brackets: state, parent, group, session.
                    session = int((entry / "stat").read_text().rpartition(")")[2].split()[3])
                except (OSError, IndexError):
                    continue  # it ended meanwhile
                if session == self._process.pid:
                    found.append(int(entry.name))
        return found

    def rss_mb(self) -> float:
        """Resident memory of the worker's processes together, shared pages counted in each of them."""
        pages = 0
        for pid in self._processes():
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except OSError:
                continue
        return pages * PAGE_BYTES / 2**20

    def stop(self, patience: float) -> None:
        """Ask the worker to end, give it `patience` seconds, then kill what is left of it."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + patience
            while self._process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to every process of the worker, as a crash of its machine would be."""
        for pid in self._processes():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
