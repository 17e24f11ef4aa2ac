"""What each process saw, outside Redis: one file a process, one line an event, each line one appending write.

Whatever was written before a SIGKILL is there: a line is on its way to the file's pages in one system call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

_encode = msgspec.json.Encoder().encode


class Event(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One line.

    Attributes:
        at: seconds of the machine's monotonic clock, the same for every process.
        what: ``ready`` when a process begins; ``intent`` before a submit, then ``accepted``, ``refused`` or
            ``unknown``; ``start`` and ``finish`` of a handler; ``outcome`` as a handle told it; ``awaited`` for one
            that did not come by the end; ``cancel`` with its answer; ``fault`` by the driver; ``dead`` for a dead
            letter that is there at the end.
        key: the submitter's own name for a message, known before the call.
        id: the message's id, known when it was accepted.
        run: names one execution; a success carries the name of the run that made it.
    """

    at: float
    what: str
    pid: int = 0
    key: str = ""
    id: str = ""
    task: str = ""
    run: str = ""
    attempt: int = 0
    deliveries: int = 0
    text: str = ""


class Ledger:
    """One process's file."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._pid = os.getpid()

    def write(self, *events: dict[str, Any]) -> None:
        """Append events of this moment, in one write."""
        at = time.monotonic()
        lines = [_encode(Event(at=at, pid=self._pid, **event)) + b"\n" for event in events]
        os.write(self._fd, b"".join(lines))

    def close(self) -> None:
        os.close(self._fd)


def read_file(path: Path) -> Iterator[Event]:
    """The events of one file; a last line that was cut off is left out."""
    decode = msgspec.json.Decoder(Event).decode
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):
            yield decode(line)


def read_ledgers(folder: Path) -> list[Event]:
    """The events of every process, by time."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in read_file(path)]
    return sorted(events, key=lambda event: event.at)
