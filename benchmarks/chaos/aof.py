"""Append-only files of servers: kept under a second name while a run goes on, and read when it is over.

A server appends every change to such a file before it answers, and in the order in which it made them. The files are
therefore a witness that costs nothing and misses nothing: all that a server ever did, and what it had done before it
was killed or deposed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import hiredis

LOOK_EVERY = 0.05
READ_BYTES = 1 << 20
Command = list[bytes]


class AofKeeper(threading.Thread):
    """Links every append-only file of some servers into a folder of ours, before its server can delete it.

    A replica that is told to follow another primary begins a new file and removes those that it had.

    Args:
        sources: node name -> the folder in which its server keeps its append-only files.
        folder: on the same file system.
    """

    def __init__(self, sources: Mapping[str, Path], folder: Path) -> None:
        super().__init__(name="aof keeper", daemon=True)
        self._sources = sources
        self._folder = folder
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(LOOK_EVERY):
            self._link_all()

    def stop(self) -> None:
        """Look for the last time."""
        self._ended.set()
        self.join()
        self._link_all()

    def _link_all(self) -> None:
        for node, source in self._sources.items():
            kept = self._folder / node
            kept.mkdir(parents=True, exist_ok=True)
            for path in source.glob("*.incr.aof"):
                try:
                    os.link(path, kept / path.name)
                except FileExistsError:
                    continue
                except FileNotFoundError:  # renamed or removed between the two looks
                    continue


@dataclass(frozen=True, slots=True)
class Segment:
    """One append-only file: what a node did since it last loaded a whole state from elsewhere.

    Attributes:
        sequence: rises with each file of a node.
        blocks: commands that took effect together (a script's, a transaction's), in order.
    """

    node: str
    sequence: int
    blocks: list[list[Command]]


def read_segments(folder: Path) -> list[Segment]:
    """Everything that was kept, the files of a node in their order."""
    segments = []
    for kept in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = {path.stat().st_ino: path for path in sorted(kept.glob("*.incr.aof"), reverse=True)}
        numbered = sorted((_sequence(path), path) for path in files.values())
        segments += [Segment(kept.name, number, list(_read_blocks(path))) for number, path in numbered]
    return segments


def _sequence(path: Path) -> int:
    """``appendonly.aof.3.incr.aof`` is number 3; a file whose rename was never seen is the last."""
    words = path.name.split(".")
    return int(words[2]) if words[2].isdigit() else 1 << 30


def _read_blocks(path: Path) -> Iterator[list[Command]]:
    together: list[Command] | None = None
    for command in _read_commands(path):
        name = command[0].upper()
        if name == b"MULTI":
            together = []
        elif name == b"EXEC":
            if together:
                yield together
            together = None
        elif name == b"SELECT":
            continue
        elif together is None:
            yield [command]
        else:
            together.append(command)


def _read_commands(path: Path) -> Iterator[Command]:
    """A last command that was cut off is left out: its server had not answered it."""
    reader = hiredis.Reader()
    with path.open("rb") as file:
        while data := file.read(READ_BYTES):
            reader.feed(data)
            while (command := reader.gets()) is not False:
                yield command


def digest(block: list[Command]) -> bytes:
    """Names a block: its entry ids and times make it unlike any other."""
    sum_ = hashlib.blake2b(digest_size=16)
    for command in block:
        for word in command:
            sum_.update(len(word).to_bytes(4, "little"))
            sum_.update(word)
    return sum_.digest()
