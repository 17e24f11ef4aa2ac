"""A step of a cluster, from what a step on this machine has told. Pure functions.

Every process has a core of its own and every host a network interface of its own, so the stages of the gradients' way
are those of a step here without what all share, with wires between them::

    gradient = longest + unhidden x (sum of the stages - longest) + messages x latency
    step     = begin + gradient + end

Work is scaled weakly: each worker computes as much a step, one shard, however many there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from benchmarks.scale.fit import Coefficients
from benchmarks.scale.parts import Parts
from benchmarks.scale.topologies import TOPOLOGIES, Load, Topology, Traffic

FLOPS_PER_PARAMETER = 6  # and token, forward and backward (Kaplan et al., "Scaling laws", 2020)
GBIT = 1e9 / 8


class Cluster(msgspec.Struct, frozen=True):
    """What is trained, and on what.

    Attributes:
        link_gbit_per_s: of each host's interface, in each direction.
        latency_s: of a message.
        tokens: that a worker goes through a step.
        flops: that a worker reaches, a second.
    """

    parameters: int
    link_gbit_per_s: float
    per_host: int = 8
    latency_s: float = 50e-6
    tokens: int = 8_192
    flops: float = 20e12

    @property
    def compute_s(self) -> float:
        """Of a worker's part of a step."""
        return FLOPS_PER_PARAMETER * self.parameters * self.tokens / self.flops

    @property
    def link(self) -> float:
        """Bytes a second."""
        return self.link_gbit_per_s * GBIT


class Method(msgspec.Struct, frozen=True):
    """How gradients are compressed, how versions come back, and how many steps a worker takes on its own (DiLoCo)."""

    up: str = "none"
    down: str = "none"
    local_steps: int = 1


METHODS = {
    "fp32": Method(),
    "int8": Method("int8"),
    "Top-K 1%": Method("topk_1%"),
    "int8 both ways": Method("int8", "int8"),
    "Top-K 1% both ways": Method("topk_1%", "topk_1%"),
    "DiLoCo 20": Method("none", "none", 20),
    "DiLoCo 100, int8": Method("int8", "none", 100),
}


class Prediction(NamedTuple):
    """One step, in seconds; of several local steps, their mean.

    Attributes:
        efficiency: time to compute by time of the step.
        bound_by: the longest stage.
    """

    workers: int
    step_s: float
    efficiency: float
    bound_by: str
    traffic: Traffic


def load_of(cluster: Cluster, method: Method, workers: int, parts: Parts) -> Load:
    """What a step of the cluster has to bring together."""
    dense = 4.0 * cluster.parameters
    return Load(
        workers,
        cluster.per_host,
        dense,
        up=dense * parts.share[method.up],
        down=dense * parts.share[method.down],
        is_sparse=method.up.startswith("topk"),
    )


def predict_step(
    topology: Topology, cluster: Cluster, method: Method, workers: int, parts: Parts, found: Coefficients
) -> Prediction:
    """A step of so many workers."""
    load = load_of(cluster, method, workers, parts)
    traffic = topology(load)
    stages = _stages(load, traffic, cluster, method, parts, found)
    steps = method.local_steps
    computing = steps * cluster.compute_s
    if steps == 1:
        stages["workers"] += computing
    longest = max(stages, key=lambda name: stages[name])
    gradient = stages[longest] + found.unhidden * (sum(stages.values()) - stages[longest])
    if steps > 1:  # nothing leaves before the last of them; each takes a step of an optimizer
        gradient += computing + steps * found.optimizer_s_per_byte * load.dense
        longest = "workers" if computing > gradient / 2 else longest
    gradient += traffic.messages * cluster.latency_s
    step = (gradient + _outside(load, traffic, cluster, method, parts, found)) / steps
    return Prediction(workers, step, cluster.compute_s / step, longest, traffic)


def _stages(
    load: Load, traffic: Traffic, cluster: Cluster, method: Method, parts: Parts, found: Coefficients
) -> dict[str, float]:
    """The gradients' way without computing: what each stage takes by itself."""
    packing = load.dense * parts.pack[method.up] * (1 + found.slower)
    if traffic.is_collective and method.up == "none":
        packing = 0.0  # nothing is checked there
    adding = parts.unpack[method.up] + parts.add
    # Gradients that a process adds for its host lie in memory as they are.
    is_summed_first = traffic.local > 0
    stages = {
        "workers": 0.0 if is_summed_first else packing,
        "host": traffic.local * parts.add + (packing if is_summed_first else 0.0),
        "wire": traffic.wire / cluster.link,
        "reducer": traffic.added * adding,
    }
    if traffic.is_collective:
        return stages
    task = found.task_s
    stages["workers"] += task["workers"] + parts.send.seconds(load.up)
    stages["server"] = (
        parts.take_in.seconds(traffic.server)
        + parts.give_out.seconds(traffic.server)
        + traffic.tasks * task["servers"]
    )
    stages["reducer"] += parts.receive.seconds(traffic.received)
    master = parts.receive.seconds(traffic.gathered) + traffic.gathered * parts.unpack["none"]
    if traffic.gathered:  # others reduce
        stages["master"] = master + traffic.tasks * task["master"]
    else:
        stages["reducer"] += traffic.tasks * task["master"]
    return stages


def _outside(
    load: Load, traffic: Traffic, cluster: Cluster, method: Method, parts: Parts, found: Coefficients
) -> float:
    """Before the first gradient and after the last."""
    optimizer = found.optimizer_s_per_byte * load.dense
    if traffic.is_collective:
        return optimizer
    wire, server = traffic.down_wire / cluster.link, parts.give_out.seconds(traffic.down_server)
    fetch = max(wire, server) + parts.receive.seconds(load.down) + 4 * cluster.latency_s
    look = found.check_s_per_byte * load.dense
    writing = found.commit_s_per_byte * load.down
    if method.down != "none":  # the master compresses the step, and every holder of the parameters takes it
        look += optimizer + load.dense * parts.unpack[method.down]
        writing += load.dense * (parts.pack[method.down] * (1 + found.slower) + parts.unpack[method.down])
    commit = found.commit_step_s + max(writing, load.down / cluster.link)
    fixed = found.begin_step_s + found.gradient_step_s + found.round_s + found.optimizer_step_s
    return fixed + fetch + look + optimizer + commit


def worker_counts(per_host: int, most: int = 1_000) -> list[int]:
    """1, 2, 4 and so on to a host, then hosts by doubling."""
    counts = [count for count in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if count < most]
    whole = [count for count in counts if count <= per_host or count % per_host == 0]
    return [*whole, most]


def curve(
    topology: str, cluster: Cluster, method: str, counts: Sequence[int], parts: Parts, found: Coefficients
) -> list[Prediction]:
    """Steps of more and more workers, by names."""
    return [
        predict_step(TOPOLOGIES[topology], cluster, METHODS[method], workers, parts, found)
        for workers in counts
    ]
