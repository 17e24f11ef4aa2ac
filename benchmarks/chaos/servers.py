"""The servers of a run, by topology, and what can be done to them. Everything here blocks: call it in threads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from benchmarks.chaos.one_server import Embedded, Single
from benchmarks.chaos.replicated import Cluster, Sentinel
from benchmarks.chaos.schedule import Kind, TopologyName
from taskmesh.testing.servers.binary import Kind as ServerKind


class Servers(Protocol):
    """One topology."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def nodes(self) -> dict[str, Path]:
        """Every node that keeps data, with the folder of its append-only files."""
        ...

    def primaries(self) -> list[str]:
        """The nodes that are primaries now."""
        ...

    def ports(self) -> list[int]:
        """Where clients may connect: what wires stand before."""
        ...

    def environment(self, ports: Sequence[int]) -> dict[str, str]:
        """How clients find the servers through wires on these ports, in the order of ``ports()``."""
        ...

    def strike(self, kind: Kind, target: int, seconds: float, share: float) -> int:
        """Carry a fault out and heal it, at once when the run is given up; returns how often it struck.

        Raises:
            RuntimeError, LookupError, redis.RedisError: it could not be carried out to its end.
        """
        ...

    def heal(self) -> None:
        """Undo whatever is still in force, and wait until all is well.

        Raises:
            RuntimeError: it does not get well.
        """
        ...


def make_servers(
    topology: TopologyName, kind: ServerKind | None, folder: Path, given_up: threading.Event
) -> Servers:
    """The servers of a topology, not started. ``given_up`` ends the waits of a fault that is under way."""
    match topology:
        case "embedded":
            return Embedded(folder / "data", given_up.wait)
        case "single":
            return Single(kind, given_up.wait)
        case "sentinel":
            return Sentinel(kind, given_up.wait)
        case "cluster":
            return Cluster(kind, given_up.wait)
