"""A queue's partitions over the nodes of a cluster: how evenly its operations fall on them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from benchmarks.depth.app import environment, make_mesh
from benchmarks.depth.programs import start_worker
from benchmarks.processes import SideFailed
from taskmesh.keys import PartitionKeys
from taskmesh.testing import RedisCluster, RedisServer, wait_until

BATCH = 500
PATIENCE = 120.0
WORK = ("xadd", "xreadgroup", "xack", "xdel", "xpending", "set")  # the work itself, without what looks at it


@dataclass(frozen=True)
class Balance:
    """What each node did for the same queue."""

    partitions: int
    operations: list[int]

    @property
    def max_by_mean(self) -> float:
        """1.0 is perfect; with three nodes, 3.0 is all on one."""
        return max(self.operations) * len(self.operations) / sum(self.operations)

    def as_json(self) -> dict[str, Any]:
        return {
            "partitions": self.partitions,
            "operations": self.operations,
            "max_by_mean": self.max_by_mean,
        }


def _operations(node: RedisServer) -> int:
    told = node.information("commandstats")
    return sum(told[f"cmdstat_{name}"]["calls"] for name in WORK if f"cmdstat_{name}" in told)


def _waiting(cluster: RedisCluster, partitions: int) -> int:
    total = 0
    for number in range(partitions):
        keys = PartitionKeys("depth", "default", number)
        total += sum(cluster.primary_of(keys.tag).command("XLEN", lane) for lane in keys.lanes)
    return total


async def _run(cluster: RedisCluster, partitions: int, tasks: int) -> None:
    told = environment(cluster.url, result_ttl=60.0, partitions=partitions)
    worker = start_worker(told)
    try:
        async with make_mesh(told) as mesh:
            noop = mesh.get_task("noop")
            for first in range(0, tasks, BATCH):
                await noop.submit_many(range(first, first + BATCH))
        await wait_until(lambda: _waiting(cluster, partitions) == 0, PATIENCE)
        if worker.poll() is not None:
            raise SideFailed(f"the worker ended (exit {worker.returncode})")
    finally:
        worker.kill()
        worker.wait()


def measure_balance(partitions: int, tasks: int, nodes: int = 3) -> Balance:
    """Submit and run so many tasks on a queue with so many partitions; what each primary did for it."""
    with RedisCluster(primaries=nodes) as cluster:
        before = [_operations(node) for node in cluster.nodes]
        asyncio.run(_run(cluster, partitions, tasks))
        after = [_operations(node) for node in cluster.nodes]
    return Balance(partitions, [last - first for first, last in zip(before, after, strict=True)])
