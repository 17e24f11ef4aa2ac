"""Programs that say what they do in lines of JSON, and whoever reads them."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, SideFailed

Line = dict[str, Any]
PATIENCE = 120.0


def tell(**what: Any) -> None:
    """One line of this program."""
    print(json.dumps(what), flush=True)


class Program:
    """A child process: its lines are read as they come, what it says on stderr goes to a file."""

    def __init__(self, command: Sequence[str], told: Mapping[str, str], log: Path) -> None:
        self.name = log.stem
        self._log = log
        self._lines: queue.SimpleQueue[Line | None] = queue.SimpleQueue()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env={**os.environ, **told, "OMP_NUM_THREADS": "1"},
                cwd=ROOT,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(b"{"):
                self._lines.put(json.loads(line))
        self._lines.put(None)

    def next(self, timeout: float = PATIENCE) -> Line:
        """The next line.

        Raises:
            SideFailed: the program has ended, or says nothing for so many seconds.
        """
        try:
            line = self._lines.get(timeout=timeout)
        except queue.Empty:
            raise SideFailed(f"{self.name} said nothing for {timeout:.0f} s: {self.last_words()}") from None
        if line is None:
            self._lines.put(None)
            raise SideFailed(f"{self.name} ended (exit {self._process.wait()}): {self.last_words()}")
        return line

    def until(self, key: str, timeout: float = PATIENCE) -> Line:
        """The next line that has the key; those before it are left out."""
        while key not in (line := self.next(timeout)):
            pass
        return line

    def last_words(self) -> str:
        """The last line on stderr that names an error, or the last one."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error: " in line]
        return (errors or lines or ["no word of why"])[-1][:400]

    def kill(self) -> float:
        """SIGKILL; returns the moment."""
        moment = time.monotonic()
        self._process.kill()
        self._process.wait()
        return moment

    def ask_to_stop(self) -> None:
        if self.is_running:
            self._process.send_signal(signal.SIGTERM)

    def end(self, patience: float) -> None:
        """Give it so many seconds to end, then kill it."""
        try:
            self._process.wait(patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
