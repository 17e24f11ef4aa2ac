"""One server process: started, frozen, killed and started again, always by its own process id."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from taskmesh.testing.servers.binary import ReservedPort
from taskmesh.testing.servers.tls import Tls

START_LIMIT = 20.0
STOP_LIMIT = 10.0
ANSWER_LIMIT = 5.0
POLL = 0.02
_EMPTY = '""'


class ServerProcess:
    """A process with a configuration file in a temporary folder of its own, on a loopback port of its own.

    Args:
        binary: the program.
        settings: its settings by name; a value may have several words.
        flags: words of the command line behind the configuration file.
        tls: makes it speak TLS, and nothing else.

    Attributes:
        port: stays the same over restarts.
    """

    def __init__(self, binary: str, settings: Mapping[str, str], *flags: str, tls: Tls | None = None) -> None:
        self._reserved = ReservedPort()
        self.port = self._reserved.number
        self._tls = tls
        self._folder = tempfile.TemporaryDirectory(prefix="taskmesh-test-")
        self._log = Path(self._folder.name, "server.log")
        own = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "dir": self._folder.name,
            "logfile": str(self._log),
            **(tls.settings(self.port) if tls else {}),
        }
        # A file and not the command line: Sentinel and CONFIG REWRITE change it, and a restart goes by it.
        file = Path(self._folder.name, "server.conf")
        file.write_text("".join(f"{key} {value or _EMPTY}\n" for key, value in {**own, **settings}.items()))
        self._command = [binary, str(file), *flags]
        self._process: subprocess.Popen[bytes] | None = None
        self._is_paused = False

    @property
    def url(self) -> str:
        if self._tls is not None:
            return f"rediss://127.0.0.1:{self.port}/0?{self._tls.query}"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_up(self) -> bool:
        """It runs, and is not frozen."""
        return self._process is not None and self._process.poll() is None and not self._is_paused

    def client(self) -> redis.Redis:
        """A plain client, for tests to look at keys. Nothing is tried twice. Close it."""
        return redis.Redis.from_url(
            self.url, retry=Retry(NoBackoff(), 0), socket_timeout=ANSWER_LIMIT, protocol=2
        )

    def command(self, *words: Any) -> Any:
        """One plain command."""
        with self.client() as client:
            return client.execute_command(*words)

    def information(self, section: str) -> dict[str, Any]:
        """A section of what INFO tells."""
        fields: dict[str, Any] = self.command("INFO", section)
        return fields

    def start(self) -> Self:
        """Start the process and wait until it answers.

        Raises:
            RuntimeError: it ended, or did not answer in time; with the end of its log.
        """
        self.launch()
        self.await_answer()
        return self

    def launch(self) -> None:
        """Start the process."""
        self._is_paused = False
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )

    def await_answer(self) -> None:
        """Wait until a process that was launched answers; errors as in ``start``."""
        give_up_at = time.monotonic() + START_LIMIT
        while True:
            try:
                self.command("PING")
                return
            except (redis.ConnectionError, redis.exceptions.BusyLoadingError):
                if not self.is_up or time.monotonic() > give_up_at:
                    text = self._log.read_text()[-2000:] if self._log.exists() else "no log"
                    raise RuntimeError(f"the server did not start: {text}") from None
                time.sleep(0.01)

    def wait_for_replicas(self, count: int, key: bytes = b"taskmesh-test") -> None:
        """Return when so many replicas have all that was written so far; ``key`` is one that this node serves.

        Raises:
            RuntimeError: they have it not within 5 s.
        """
        with self.client() as client, client.client() as one:
            # WAIT looks at what its own connection wrote: a write behind all others stands for them.
            one.set(key, "", px=1)
            if int(one.execute_command("WAIT", count, int(ANSWER_LIMIT * 1000) - 500)) < count:
                raise RuntimeError(f"{count} replicas did not catch up with the server at port {self.port}")

    def kill(self) -> None:
        """End the process without warning."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(STOP_LIMIT)
            self._process = None
        self._is_paused = False

    def pause(self) -> None:
        """Freeze the process: it keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)
        self._is_paused = True

    def resume(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)
        self._is_paused = False

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            os.kill(self._process.pid, number)

    def stop(self) -> None:
        """End the process and remove its folder."""
        self.kill()
        self._reserved.release()
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def start_all(processes: list[Any]) -> None:
    """Start processes side by side."""
    for process in processes:
        process.launch()
    for process in processes:
        process.await_answer()


def await_condition(condition: Callable[[], bool], limit: float, what: str) -> None:
    """Return as soon as ``condition`` is true; errors of a server that is on its way count as false.

    Raises:
        RuntimeError: it did not come true within ``limit`` seconds; the message says ``what``.
    """
    give_up_at = time.monotonic() + limit
    while True:
        try:
            if condition():
                return
            reason = ""
        except (redis.RedisError, OSError) as error:
            reason = f": {error}"
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{what} within {limit:g} s{reason}")
        time.sleep(POLL)


class ServerSet(ABC):
    """Several servers as one thing to start and stop: also a context manager."""

    @abstractmethod
    def start(self) -> Self: ...

    @abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
