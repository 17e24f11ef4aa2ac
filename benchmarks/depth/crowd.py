"""Many workers' leases in one process:  python -m benchmarks.depth.crowd URL TTL MEMBERS HOLD

Each member enters the queue, keeps its lease by the worker's own heartbeat, looks for dead workers, promotes and sweeps
as often as a worker does, and takes no work. With HOLD the first one takes that many messages and keeps them. A line
"ready" says that all are in; at the end of its standard input the process ends, and all of them die.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Self

from benchmarks.processes import ROOT, SideFailed
from taskmesh.broker.caller import Caller
from taskmesh.broker.connect import Server
from taskmesh.broker.liveness import look, pause_between_looks
from taskmesh.broker.streams import Partition
from taskmesh.clock import SystemClock
from taskmesh.errors import BrokerError
from taskmesh.keys import GROUP, PartitionKeys
from taskmesh.messages import Priority
from taskmesh.worker.lease import Keeper, Place
from taskmesh.worker.upkeep import LONGEST_NAP, MAX_PROMOTE

MESH, QUEUE = "bench", "default"  # those of `peers/ours.py`
TASKS = ("noop", "suspend", "nap", "slow")
TAKE_AT_ONCE = 1000


async def _enter(partition: Partition, name: bytes) -> None:
    await partition.join(name, TASKS)
    for lane in partition.keys.lanes:  # as a first read would
        await partition.caller.command(partition.keys.tag, "XGROUP", "CREATECONSUMER", lane, GROUP, name)


async def _take(partition: Partition, name: bytes, count: int) -> None:
    lane = partition.keys.lanes[Priority.NORMAL]
    head = ("XREADGROUP", "GROUP", GROUP, name, "COUNT", TAKE_AT_ONCE, "STREAMS", lane, ">")
    while count > 0:
        reply = await partition.caller.command(partition.keys.tag, *head)
        count -= len(reply[0][1])


async def _often(what: Callable[[], Awaitable[float]]) -> None:
    """Do it again and again, after the pause that it returns; the first time at a random moment of a second."""
    await asyncio.sleep(random.random())
    while True:
        try:
            pause = await what()
        except BrokerError:
            pause = 1.0
        await asyncio.sleep(pause * random.uniform(0.8, 1.0))


class _Member:
    """What a worker asks of the server when it has nothing to do, its reads left aside."""

    def __init__(self, partition: Partition, ttl: float) -> None:
        self._partition = partition
        self._ttl = ttl

    async def look(self) -> float:
        return pause_between_looks(self._ttl, (await look(self._partition, self._ttl)).workers)

    async def promote(self) -> float:
        await self._partition.promote(MAX_PROMOTE)
        return LONGEST_NAP

    async def sweep(self) -> float:
        await self._partition.sweep()
        return self._ttl


async def _live(url: str, ttl: float, members: int, hold: int) -> None:
    server = await Server.connect(url)
    partition = Partition(Caller(server, SystemClock(), 15.0), PartitionKeys(MESH, QUEUE, 0))
    keys = partition.keys
    names = [f"crowd-{os.getpid()}-{number}".encode() for number in range(members)]
    for name in names:
        await _enter(partition, name)
    keeper = Keeper(
        url, [Place(keys.tag, keys.workers)] * members, ttl, names.__getitem__, lambda: 0, lambda *_: None
    )
    alive = [asyncio.create_task(keeper.run())]
    await _take(partition, names[0], hold)
    for member in (_Member(partition, ttl) for _ in names):
        alive += [asyncio.create_task(_often(what)) for what in (member.look, member.promote, member.sweep)]
    print("ready", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(sys.stdin, ended.set)
    await ended.wait()
    os._exit(0)  # without leaving: they die


def main() -> None:
    """Live until the standard input ends."""
    url, ttl, members, hold = sys.argv[1:]
    asyncio.run(_live(url, float(ttl), int(members), int(hold)))


class Crowd:
    """``with Crowd(url, ttl, members, hold) as crowd:`` the process; it dies at the end, or with ``kill``."""

    def __init__(self, url: str, ttl: float, members: int, hold: int = 0) -> None:
        self._arguments = [url, str(ttl), str(members), str(hold)]
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "benchmarks.depth.crowd", *self._arguments]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        assert self._process.stdout is not None
        if self._process.stdout.readline() != b"ready\n":
            self.kill()
            raise SideFailed("the crowd did not come up")
        return self

    def kill(self) -> None:
        """Let all of them die."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


if __name__ == "__main__":
    main()
