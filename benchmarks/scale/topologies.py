"""What a step moves and adds in each topology: bytes, at whoever has most of them. Pure functions.

Workers stand in hosts of ``per_host``, each with one network interface for both directions; a host that is full counts.
Master and, where there is one, the server for bulk values are machines of their own. Where the topology spreads what it
reduces (``sharded``, ``tree``), each host has a server, a node of a cluster, and holds as much as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

GROUP_HOSTS = 8  # in a group of ranks that counts as one worker
FAN_IN = 8


class Load(NamedTuple):
    """What a step has to bring together.

    Attributes:
        dense: bytes of a gradient, and of the parameters, as fp32.
        up: of one compressed gradient.
        down: of what is fetched of a new version, once for each host.
        is_sparse: a sum of compressed gradients is as large as they are together, until it is dense.
    """

    workers: int
    per_host: int
    dense: float
    up: float
    down: float
    is_sparse: bool = False

    @property
    def hosts(self) -> int:
        return math.ceil(self.workers / self.per_host)

    @property
    def here(self) -> int:
        """Workers of the fullest host."""
        return min(self.workers, self.per_host)

    @property
    def fetched(self) -> float:
        """Bytes of a new version that all hosts fetch together."""
        return self.hosts * self.down

    def summed(self, gradients: int) -> float:
        """Bytes of the sum of so many gradients, compressed once more."""
        return min(gradients * self.up, self.dense) if self.is_sparse else self.up


class Traffic(NamedTuple):
    """One step's.

    Attributes:
        sent: bytes of gradients that leave their workers or, where these are summed first, their hosts; all together.
        wire: bytes of gradients through the busiest interface, one way.
        server: through the busiest server, in and out again.
        received: by the busiest reducer.
        added: of fp32, that it decodes and adds.
        local: of fp32, that one process adds for its host.
        gathered: of fp32, that the master takes when others have reduced them.
        tasks: that the master publishes.
        messages: that must come one after the other.
        down_wire, down_server: bytes of parameters through the busiest interface, and out of the busiest server.
        is_collective: ranks reduce among themselves and step the optimizer each; there is no master.
    """

    sent: float
    wire: float
    server: float = 0.0
    received: float = 0.0
    added: float = 0.0
    local: float = 0.0
    gathered: float = 0.0
    tasks: int = 0
    messages: int = 2
    down_wire: float = 0.0
    down_server: float = 0.0
    is_collective: bool = False


def star(load: Load) -> Traffic:
    """Every gradient goes through the server to the master, and every host fetches the version."""
    gradients = load.workers * load.up
    return Traffic(
        sent=gradients,
        wire=gradients,
        server=gradients,
        received=gradients,
        added=load.workers * load.dense,
        tasks=load.workers,
        down_wire=load.fetched,
        down_server=load.fetched,
    )


def per_host(load: Load) -> Traffic:
    """A host's gradients are summed in its memory; the sum is compressed and goes on as in the star."""
    of_hosts = star(load._replace(workers=load.hosts, per_host=1, up=load.summed(load.here)))
    return of_hosts._replace(
        local=load.here * load.dense,
        tasks=load.workers,
        down_wire=load.fetched,
        down_server=load.fetched,
    )


def _spread(load: Load, gradients: int, each: float) -> Traffic:
    """Each host reduces an equal range of so many gradients; the master takes the ranges and writes the version."""
    hosts = load.hosts
    return Traffic(
        sent=gradients * each,
        wire=max(gradients / hosts * each * (hosts - 1) / hosts, load.dense),
        server=(gradients * each + load.dense) / hosts,
        received=gradients * each / hosts,
        added=gradients * load.dense / hosts,
        gathered=load.dense,
        tasks=load.workers + hosts,
        messages=4,
        down_wire=load.down,
        down_server=load.down,
    )


def sharded(load: Load) -> Traffic:
    """Ranges of the gradient are reduced by as many hosts as there are (the elastic parameter server)."""
    return _spread(load, load.workers, load.up)


def sharded_per_host(load: Load) -> Traffic:
    """The same after each host has summed its own."""
    found = _spread(load, load.hosts, load.summed(load.here))
    return found._replace(local=load.here * load.dense)


def tree(load: Load, fan_in: int = FAN_IN) -> Traffic:
    """Hosts' sums meet, ``fan_in`` at a time, on a host that sends theirs on; the last to add is the master.

    Chunk by chunk: the levels work side by side, each on hosts of its own.
    """
    count, gradients, tasks, levels = load.hosts, load.here, load.workers, [load.summed(load.here)]
    sent, wire = count * levels[0], min(fan_in, count) * levels[0]
    while count > fan_in:
        count, gradients = math.ceil(count / fan_in), gradients * fan_in
        levels.append(load.summed(gradients))
        sent, wire = sent + count * levels[-1], max(wire, min(fan_in, count) * levels[-1])
        tasks += count
    return Traffic(
        sent=sent,
        wire=wire,
        server=levels[0]
        + (levels[-1] if len(levels) > 1 else 0.0),  # its host's own sum, and the one it adds up
        received=wire,
        added=min(fan_in, load.hosts) * load.dense,
        local=load.here * load.dense,
        tasks=tasks,
        messages=2 * len(levels),
        down_wire=load.down,
        down_server=load.down,
    )


def _all_reduce(ranks: int, size: float) -> float:
    """Bytes that each rank of a ring sends, and receives: reduce-scatter, then all-gather.

    Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
    """
    return 2 * (ranks - 1) / ranks * size


def ring(load: Load) -> Traffic:
    """DDP: one ring of all ranks, host by host, fp32; an edge of it leaves each host and one enters."""
    wire = _all_reduce(load.workers, load.dense) if load.hosts > 1 else 0.0
    return Traffic(
        sent=_all_reduce(load.workers, load.dense) * load.workers,
        wire=wire,
        added=load.dense,
        messages=2 * (load.workers - 1),
        is_collective=True,
    )


def torus(load: Load) -> Traffic:
    """Hosts in a grid as square as can be, once each has summed its own: rows scatter, columns reduce, rows gather.

    Each element that is passed on is compressed anew. Sparse gradients are gathered instead. Mikami et al.,
    "Massively distributed SGD: ImageNet/ResNet-50 training in a flash", 2018; latencies as in Thakur, Rabenseifner
    and Gropp, "Optimization of collective communication operations in MPICH", 2005.
    """
    hosts, each = load.hosts, load.summed(load.here)
    rows = math.ceil(math.sqrt(hosts))
    columns = math.ceil(hosts / rows)
    if load.is_sparse:
        wire = min((hosts - 1) * each, _all_reduce(hosts, load.dense))
    else:
        wire = _all_reduce(rows, each) + _all_reduce(columns, each) / rows
    return Traffic(
        sent=hosts * wire,
        wire=wire,
        added=2 * load.dense,
        local=load.here * load.dense,
        messages=2 * (rows - 1 + columns - 1),
        is_collective=True,
    )


def groups(load: Load) -> Traffic:
    """Groups of a few hosts that are a torus inside, fp32, and one worker each to a star outside."""
    inside = torus(
        load._replace(workers=min(load.workers, GROUP_HOSTS * load.per_host), up=load.dense, is_sparse=False)
    )
    count = math.ceil(load.hosts / GROUP_HOSTS)
    outside = star(load._replace(workers=count, per_host=1))
    spread = (
        load.dense if load.hosts > 1 else 0.0
    )  # one host passes the parameters on to the others of its group
    return outside._replace(
        wire=inside.wire + outside.wire,
        local=inside.local + inside.added,
        messages=inside.messages + outside.messages,
        down_wire=outside.down_wire + spread,
    )


Topology = Callable[[Load], Traffic]
TOPOLOGIES: dict[str, Topology] = {
    "star": star,
    "per host": per_host,
    "sharded": sharded,
    "sharded, per host": sharded_per_host,
    "tree": tree,
    "2D torus": torus,
    "groups": groups,
    "DDP ring": ring,
}
