"""The processes of a run: in slots, so that one that ends has a successor."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

READY_LIMIT = 30.0
EXIT_LIMIT = 20.0
ORPHAN_LIMIT = 3.0
LAST_WORDS = 3000  # characters of a log that are shown


@dataclass(slots=True)
class Slot:
    """A place for one process after the other.

    Attributes:
        lock: held by whoever does something to the process.
        wanted: it is to run; one that ends by itself meanwhile has crashed.
    """

    role: str
    number: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    incarnation: int = 0
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = False

    @property
    def name(self) -> str:
        return f"{self.role}{self.number}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class Fleet:
    """Starts, stops and ends them; each incarnation has a ledger and a log of its own.

    Attributes:
        crashes: what was noted of processes that ended by themselves, or did not end when they were told to.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], seed: int) -> None:
        self._ledgers = folder / "ledgers"
        self._logs = folder / "logs"
        for made in (self._ledgers, self._logs):
            made.mkdir(parents=True, exist_ok=True)
        self._environment = {**os.environ, **environment}
        for variable in ("TASKMESH_URL", "TASKMESH_DATA", "TASKMESH_BULK_URL"):
            if variable not in environment:
                self._environment.pop(variable, None)
        self._seed = seed
        self.slots: list[Slot] = []
        self.crashes: list[str] = []

    def add(self, role: str, count: int) -> None:
        """More slots, each with its first process."""
        for number in range(count):
            slot = Slot(role, number)
            self.slots.append(slot)
            self.start(slot)

    def of(self, *roles: str) -> list[Slot]:
        return [slot for slot in self.slots if slot.role in roles]

    def start(self, slot: Slot) -> None:
        """The slot's next incarnation."""
        slot.incarnation += 1
        name = f"{slot.name}.{slot.incarnation}"
        environment = {**self._environment, "CHAOS_LEDGER": str(self._ledgers / f"{name}.jsonl")}
        if slot.role == "worker":
            words = ["benchmarks.chaos.worker"]
            if slot.number == 0:
                environment["CHAOS_OLD"] = "1"
        else:
            words = ["benchmarks.chaos.producer", slot.name, str(slot.incarnation), str(self._seed)]
        with (self._logs / f"{name}.log").open("wb") as log:
            slot.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                start_new_session=True,  # Ctrl-C is the driver's
            )
        slot.wanted = True

    async def ready(self) -> None:
        """Return when the process of every slot has begun.

        Raises:
            RuntimeError: one has not within a while.
        """
        give_up_at = time.monotonic() + READY_LIMIT
        for slot in self.slots:
            ledger = self._ledgers / f"{slot.name}.{slot.incarnation}.jsonl"
            while not (ledger.exists() and ledger.stat().st_size):
                if time.monotonic() > give_up_at:
                    self._note(slot, "did not begin")
                    raise RuntimeError(self.crashes[-1])
                await asyncio.sleep(0.02)

    async def kill(self, slot: Slot) -> float:
        """SIGKILL; returns when that was, on the monotonic clock."""
        slot.wanted = False
        at = time.monotonic()
        if slot.process is not None:
            slot.process.kill()
            await asyncio.to_thread(slot.process.wait)
        return at

    async def stop(self, slot: Slot, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        if not slot.is_running:
            return
        os.kill(slot.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(slot.pid, signal.SIGCONT)

    def tell(self, slot: Slot, number: signal.Signals) -> None:
        """Send the process a signal by which it will end."""
        slot.wanted = False
        if slot.is_running:
            os.kill(slot.pid, number)

    async def end(self, slot: Slot) -> None:
        """SIGTERM; returns when the process has ended. One that does not is noted as a crash and killed."""
        if slot.process is None:
            return
        self.tell(slot, signal.SIGTERM)
        try:
            code = await asyncio.to_thread(slot.process.wait, EXIT_LIMIT)
        except subprocess.TimeoutExpired:
            self._note(slot, f"did not end within {EXIT_LIMIT:g} s of SIGTERM")
            await self.kill(slot)
            return
        if code not in (0, -signal.SIGTERM, -signal.SIGUSR1):  # it may have come before there was a handler
            self._note(slot, f"ended with status {code}")

    async def watch(self) -> None:
        """Start again what ends by itself, and note it."""
        while True:
            for slot in self.slots:
                if slot.wanted and not slot.is_running and not slot.lock.locked():
                    self._note(
                        slot, f"ended by itself with status {slot.process and slot.process.returncode}"
                    )
                    self.start(slot)
            await asyncio.sleep(0.1)

    def _note(self, slot: Slot, text: str) -> None:
        log = self._logs / f"{slot.name}.{slot.incarnation}.log"
        words = log.read_text(errors="replace")[-LAST_WORDS:] if log.exists() else ""
        self.crashes.append(f"{slot.name}.{slot.incarnation} (pid {slot.pid}) {text}\n{words}")

    def end_all(self) -> None:
        """At the very end, whatever has happened. What a process had started must end with it, and soon."""
        for slot in self.slots:
            slot.wanted = False
            if slot.process is not None:
                slot.process.kill()
                slot.process.wait()
        give_up_at = time.monotonic() + ORPHAN_LIMIT
        while (left := list(processes_of(self._ledgers))) and time.monotonic() < give_up_at:
            time.sleep(0.02)
        for pid in left:
            self.crashes.append(f"process {pid} outlived the one that had started it")
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_of(folder: Path) -> Iterator[int]:
    """Other processes that know of a folder, by their command line or their environment (Linux)."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            told = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            if str(folder).encode() in told and int(entry.name) != os.getpid():
                yield int(entry.name)


class WireProcess:
    """The program ``benchmarks.chaos.wires``, and how to order faults from it."""

    def __init__(self, ports: list[int], seed: int) -> None:
        self._ports = ports
        self._seed = seed
        self._process: asyncio.subprocess.Process | None = None
        self._answers: dict[int, asyncio.Future[int]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._number = 0

    async def start(self) -> list[int]:
        """Returns the ports for the clients."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.chaos.wires",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._send({"ports": self._ports, "seed": self._seed})
        assert self._process.stdout is not None
        ports: list[int] = json.loads(await self._process.stdout.readline())
        self._reader = asyncio.create_task(self._read())
        return ports

    def _send(self, order: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")

    async def order(self, do: str, **more: Any) -> int:
        """Carry one fault out; returns how many connections it struck."""
        self._number += 1
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        self._send({"number": self._number, "do": do, **more})
        return await answer

    async def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            self._answers.pop(answer["number"]).set_result(answer["struck"])

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
