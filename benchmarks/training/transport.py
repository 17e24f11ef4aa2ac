"""Large values to a server and back: through taskmesh, and through a bare socket that does the same."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Sequence

import uvloop

from benchmarks.servers import Server
from taskmesh import Mesh, MeshSettings
from taskmesh.broker import chunks

VALUE_BYTES = 1024 * 1024
VALUES = 40  # 10,000,000 parameters, nearly
Pieces = Sequence[memoryview]


class BareSocket:
    """SET and GET of many values, all requests at once, from preallocated memory and into it."""

    def __init__(self, server: Server) -> None:
        port = int(server.url.rpartition(":")[2].partition("/")[0])
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._small = memoryview(bytearray(64))

    def __enter__(self) -> BareSocket:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def put(self, keys: Sequence[bytes], pieces: Pieces) -> None:
        for key, piece in zip(keys, pieces, strict=True):
            self._socket.sendall(b"*3\r\n$3\r\nSET\r\n$%d\r\n%s\r\n$%d\r\n" % (len(key), key, len(piece)))
            self._socket.sendall(piece)
            self._socket.sendall(b"\r\n")
        for _ in keys:
            self._expect(b"+OK\r\n")

    def get(self, keys: Sequence[bytes], pieces: Pieces) -> None:
        self._socket.sendall(b"".join(b"*2\r\n$3\r\nGET\r\n$%d\r\n%s\r\n" % (len(key), key) for key in keys))
        for piece in pieces:
            self._expect(b"$%d\r\n" % len(piece))
            self._fill(piece)
            self._expect(b"\r\n")

    def _expect(self, wanted: bytes) -> None:
        found = self._small[: len(wanted)]
        self._fill(found)
        assert found == wanted, bytes(found)

    def _fill(self, target: memoryview) -> None:
        while target:
            count = self._socket.recv_into(target)
            assert count, "the server has closed the connection"
            target = target[count:]


class Taken:
    """How long each way and side took, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def note(self, kind: str, began: float) -> None:
        self.seconds.setdefault(kind, []).append(time.perf_counter() - began)


async def _compare(server: Server, rounds: int, values: int) -> Taken:
    taken = Taken()
    source = memoryview(bytearray(b"\x5a" * VALUE_BYTES * values))
    target = memoryview(bytearray(len(source)))
    read, write = chunks.split(target), chunks.split(source)
    ours = [b"{bench:%d}" % place for place in range(values)]
    theirs = [b"bare:%d" % place for place in range(values)]
    async with Mesh("transport", settings=MeshSettings(url=server.url)) as mesh:
        with BareSocket(server) as bare:
            for at in range(rounds + 1):
                if at == 1:  # the first round warms up
                    taken.seconds.clear()
                began = time.perf_counter()
                await chunks.put(mesh.client.bulk, ours, write)
                taken.note("ours_write", began)
                began = time.perf_counter()
                bare.put(theirs, write)
                taken.note("bare_write", began)
                began = time.perf_counter()
                await chunks.get(
                    mesh.client.bulk, ours, lambda place, _: read[place], lambda _: None, len(target)
                )
                taken.note("ours_read", began)
                assert target == source
                began = time.perf_counter()
                bare.get(theirs, read)
                taken.note("bare_read", began)
    return taken


def measure_transport(rounds: int, values: int = VALUES) -> dict[str, object]:
    """MB/s each way, medians of rounds in turn; and our share of the bare socket's, the lower of the two."""
    with Server() as server:
        taken = uvloop.run(_compare(server, rounds, values))
    size = VALUE_BYTES * values / 1e6
    speeds = {kind: size / statistics.median(seconds) for kind, seconds in taken.seconds.items()}
    shares = {way: speeds[f"ours_{way}"] / speeds[f"bare_{way}"] for way in ("write", "read")}
    return {
        "transport_share_of_bare_socket": min(shares.values()),
        "transport_shares": shares,
        "transport_mb_per_s": speeds,
    }
