"""Two network namespaces joined by a link that is held to a rate. Linux, as root, with ip and tc (iproute2).

They are removed when the block is left, whatever ends it; those that a killed process left behind go at the next start.
The right side has shared memory of its own, as another machine would.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

NAMES = re.compile(r"tmbench-(\d+)-[lr]")
BURST, LATENCY = "256kb", "50ms"  # of the token bucket: what may pass at once, what may wait
LEFT, RIGHT = "10.77.31.1", "10.77.31.2"


class NoLink(Exception):
    """This machine has no such link; the message says what is missing."""


OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$0" "$@"')


class Side(NamedTuple):
    """One end of the link; ``prefix`` goes before a command that is to run there."""

    namespace: str
    interface: str
    address: str
    own_memory: bool

    @property
    def prefix(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.namespace, *(OWN_MEMORY if self.own_memory else ()))


class Link(NamedTuple):
    left: Side
    right: Side


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLink(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout


def _remove(namespaces: list[str]) -> None:
    for namespace in namespaces:
        subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _remove_leftovers() -> None:
    """Namespaces of a benchmark that was killed."""
    found = [name.split()[0] for name in _run("ip", "netns", "list").splitlines() if name.strip()]
    named = [(name, match) for name in found if (match := NAMES.fullmatch(name)) is not None]
    _remove([name for name, match in named if not Path("/proc", match[1]).exists()])


def _join(rate: str, left: Side, right: Side) -> None:
    for side in (left, right):
        _run("ip", "netns", "add", side.namespace)
    _run(
        "ip", "link", "add", left.interface, "netns", left.namespace, "type", "veth",
        "peer", "name", right.interface, "netns", right.namespace,
    )  # fmt: skip
    for namespace, interface, address, _ in (left, right):
        here = ("ip", "-n", namespace)
        _run(*here, "addr", "add", f"{address}/24", "dev", interface)
        _run(*here, "link", "set", "lo", "up")
        _run(*here, "link", "set", interface, "up")
        _run(
            "tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf",
            "rate", rate, "burst", BURST, "latency", LATENCY,
        )  # fmt: skip


@contextmanager
def link(rate: str) -> Iterator[Link]:
    """A link of that rate, in each direction ("100mbit").

    Raises:
        NoLink: it cannot be made here.
    """
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise NoLink(f"no {' and no '.join(missing)} on the PATH (iproute2)")
    if os.geteuid() != 0:
        raise NoLink("network namespaces need root")
    _remove_leftovers()
    left, right = (
        Side(f"tmbench-{os.getpid()}-{end}", f"tm{os.getpid()}{end}", address, end == "r")
        for end, address in (("l", LEFT), ("r", RIGHT))
    )
    try:
        _join(rate, left, right)
        yield Link(left, right)
    finally:
        signals = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a second Ctrl-C must not leave them behind
        _remove([left.namespace, right.namespace])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
