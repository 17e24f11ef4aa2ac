"""The processes of a DDP group."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from benchmarks.servers import free_port
from benchmarks.training.lines import Program
from benchmarks.training.plan import Ranks, encode


class Place(NamedTuple):
    """Where a rank runs: the interface that gloo uses there, and what goes before its command."""

    interface: str = "lo"
    prefix: tuple[str, ...] = ()


@contextmanager
def group(ranks: Ranks, places: Sequence[Place] = (Place(), Place())) -> Iterator[Program]:
    """Rank 0 of a running group, with a rank at each place; all have ended when the block is left."""
    ranks = msgspec.structs.replace(ranks, port=free_port(), count=len(places))
    programs: list[Program] = []
    with tempfile.TemporaryDirectory(prefix="bench-ddp-") as folder:
        try:
            for rank, place in enumerate(places):
                command = [*place.prefix, sys.executable, "-m", "benchmarks.training.ddp", str(rank)]
                told = encode(msgspec.structs.replace(ranks, interface=place.interface))
                programs.append(Program(command, told, Path(folder, f"rank-{rank}.log")))
            yield programs[0]
        except BaseException:
            for program in programs:
                program.ask_to_stop()
            raise
        finally:
            for program in programs:
                program.end(5.0)
