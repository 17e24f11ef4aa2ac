"""One server: the embedded one, and one of its own on a port."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import redis

from benchmarks.chaos.schedule import Kind
from benchmarks.chaos.strikes import AOF, TINY_BYTES, Sleep, aof_folder, fill, heal_nodes, restart, set_limit
from taskmesh.broker.embedded import EmbeddedServer
from taskmesh.testing.servers.binary import Kind as ServerKind
from taskmesh.testing.servers.single import RedisServer


class Embedded:
    """The local server of a data folder, which its users start again themselves."""

    def __init__(self, folder: Path, sleep: Sleep) -> None:
        self._folder = folder
        self._sleep = sleep
        self._share: EmbeddedServer | None = None

    def start(self) -> None:
        self._share = EmbeddedServer.acquire(self._folder)
        with self._client() as client:
            client.config_set("appendfsync", "no")

    def stop(self) -> None:
        if self._share is not None:
            pid = self._pid()
            self._share.release()
            give_up_at = time.monotonic() + 10.0
            while _is_alive(pid) and time.monotonic() < give_up_at:
                time.sleep(0.02)

    def _client(self) -> redis.Redis:
        assert self._share is not None
        return redis.Redis.from_url(self._share.url, socket_timeout=5.0)

    def _pid(self) -> int:
        with self._client() as client:
            information: dict[str, Any] = client.info("server")
        return int(information["process_id"])

    def nodes(self) -> dict[str, Path]:
        with self._client() as client:
            return {"embedded": aof_folder(client)}

    def primaries(self) -> list[str]:
        return ["embedded"]

    def ports(self) -> list[int]:
        return []

    def environment(self, ports: Sequence[int]) -> dict[str, str]:
        return {"TASKMESH_DATA": str(self._folder)}

    def strike(self, kind: Kind, target: int, seconds: float, share: float) -> int:
        match kind:
            case Kind.CUT:
                return self._cut(Random(target), share)
            case Kind.FULL:
                with self._client() as client:
                    set_limit(client, TINY_BYTES)
                    self._sleep(seconds)
                self.heal()
            case Kind.SERVER_RESTART:
                os.kill(self._pid(), signal.SIGKILL)
                self._sleep(seconds)
                self.heal()
            case Kind.SERVER_STOP:
                pid = self._pid()
                os.kill(pid, signal.SIGSTOP)
                self._sleep(seconds)
                os.kill(pid, signal.SIGCONT)
            case _:
                raise ValueError(kind)
        return 1

    def _cut(self, draw: Random, share: float) -> int:
        with self._client() as client:
            own = client.client_id()
            ids = [row["id"] for row in client.client_list() if int(row["id"]) != own]
            chosen = draw.sample(ids, round(share * len(ids)))
            return sum(client.client_kill_filter(_id=one) for one in chosen)

    def heal(self) -> None:
        EmbeddedServer.acquire(self._folder).release()  # it may have been killed, and nobody has noticed
        with self._client() as client:
            set_limit(client, 0)
            client.config_set("appendfsync", "no")


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Single:
    """One server."""

    def __init__(self, kind: ServerKind | None, sleep: Sleep) -> None:
        self._sleep = sleep
        self._server = RedisServer(kind, aof=True, options=AOF)

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop()

    def nodes(self) -> dict[str, Path]:
        with self._server.client() as client:
            return {"single": aof_folder(client)}

    def primaries(self) -> list[str]:
        return ["single"]

    def ports(self) -> list[int]:
        return [self._server.port]

    def environment(self, ports: Sequence[int]) -> dict[str, str]:
        return {"TASKMESH_URL": f"redis://127.0.0.1:{ports[0]}/0"}

    def strike(self, kind: Kind, target: int, seconds: float, share: float) -> int:
        match kind:
            case Kind.FULL:
                fill([self._server], seconds, self._sleep)
            case Kind.SERVER_RESTART:
                restart(self._server, seconds, self._sleep)
            case Kind.SERVER_STOP:
                self._server.pause()
                self._sleep(seconds)
                self._server.resume()
            case _:
                raise ValueError(kind)
        return 1

    def heal(self) -> None:
        heal_nodes([self._server])
