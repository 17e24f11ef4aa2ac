"""The demo's worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path


class Workers:
    """Worker processes of the demo's Mesh; all are ended when the block is left."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._log = folder / "workers.log"
        # One thread each: three workers on two cores would only get in each other's way with more.
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> subprocess.Popen[bytes]:
        """Start one more."""
        command = [sys.executable, "-m", "taskmesh.cli.main", "worker", "taskmesh.demo.app:mesh", "-c", "2"]
        with self._log.open("ab") as log:
            process = subprocess.Popen(command, env=self._environment, stdout=log, stderr=log)
        self.processes.append(process)
        return process

    def log_tail(self) -> str:
        """The end of what the workers said."""
        return self._log.read_text(errors="replace")[-2000:] if self._log.exists() else ""

    def drain(self, timeout: float = 20.0) -> None:
        """Ask all to finish, and wait until they have."""
        for process in self.processes:
            if process.poll() is None:
                process.terminate()
        for process in self.processes:
            process.wait(timeout)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()
