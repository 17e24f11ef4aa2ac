"""The Mesh of the runs that need more than no-ops: kills, partitions, soak. It is told all by the environment.

``DEPTH_URL`` and ``DEPTH_TTL`` for the server and its liveness TTL, ``DEPTH_RESULT_TTL``, ``DEPTH_PARTITIONS``, and
``DEPTH_JOURNAL`` for the file in which ``nap`` notes its starts and ends.
"""

from __future__ import annotations

import asyncio
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from taskmesh import Context, Mesh, MeshSettings, QueueOptions

RECORD = struct.Struct("<dIHH")


class Mark(NamedTuple):
    """A start or an end of one run of a task; ``at`` is monotonic seconds."""

    at: float
    task: int
    deliveries: int
    is_end: int


def environment(
    url: str, ttl: float = 2.0, result_ttl: float = 0.0, partitions: int = 1, journal: Path | None = None
) -> dict[str, str]:
    """What tells a process of its part."""
    return {
        "DEPTH_URL": url,
        "DEPTH_TTL": str(ttl),
        "DEPTH_RESULT_TTL": str(result_ttl),
        "DEPTH_PARTITIONS": str(partitions),
        "DEPTH_JOURNAL": str(journal or os.devnull),
    }


def read_journal(path: Path) -> Iterator[Mark]:
    """Every mark that a process has made so far; one that was cut off in the middle is left out."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) - len(data) % RECORD.size
    return (Mark(*fields) for fields in RECORD.iter_unpack(data[:whole]))


def make_mesh(told: dict[str, str]) -> Mesh:
    """The Mesh and its tasks, as ``environment`` describes them."""
    settings = MeshSettings(
        url=told["DEPTH_URL"],
        liveness_ttl=float(told["DEPTH_TTL"]),
        result_ttl=float(told["DEPTH_RESULT_TTL"]),
    )
    options = QueueOptions(partitions=int(told["DEPTH_PARTITIONS"]))
    mesh = Mesh("depth", settings=settings, queues={"default": options})
    journal = os.open(told["DEPTH_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    @mesh.task(name="noop")
    async def noop(i: int) -> int:
        return i

    @mesh.task(name="nap", max_deliveries=100)
    async def nap(ctx: Context, i: int, seconds: float) -> None:
        os.write(journal, RECORD.pack(time.monotonic(), i, ctx.deliveries, 0))
        await asyncio.sleep(seconds)
        os.write(journal, RECORD.pack(time.monotonic(), i, ctx.deliveries, 1))

    return mesh
