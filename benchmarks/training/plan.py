"""What one run of the benchmark is. Every process of it is told by one environment variable."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

from taskmesh.training.compression import Compression, Int8, LowRank, NoCompression, TopK
from taskmesh.training.setup import Reduce

VARIABLE = "TRAINING_BENCH_PLAN"
SLOWNESS = "TRAINING_BENCH_SLOWNESS"  # of one worker: how many times longer its shards take
NEVER = 1_000_000_000

# By the names that the figures have. The last is the control that has to fail.
COMPRESSIONS: dict[str, Callable[[], Compression]] = {
    "none": NoCompression,
    "int8": Int8,
    "topk_10%": lambda: TopK(0.1),
    "topk_1%": lambda: TopK(0.01),
    "lowrank_8": lambda: LowRank(8),
    "topk_0.1%_without_feedback": lambda: TopK(0.001, feedback=False),
}


class Chase(msgspec.Struct, frozen=True):
    """A run that goes on until its validation loss is low enough.

    Attributes:
        target: that loss; None goes on to the last step.
        every: steps from one evaluation to the next. They are off the clock.
        interface: the network interface whose bytes are counted; empty for none.
    """

    target: float | None = None
    every: int = 5
    interface: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        work: what is trained, one of ``works.WORKS``.
        size: of the work, where it has sizes: about so many parameters.
        name: of the Mesh: runs of different names do not see each other.
        workers: that the master waits for before it begins.
        marks: a file for the moments of each step; empty for none.
        go_back: at the commit of the first of these steps, roll back to the checkpoint of the second.
        hold: whether buckets of gradients are held back until backward is over.
        backups: shards of a step that may be out a second time at once.
        meter: whether the bytes that the servers moved are told with each commit.
    """

    work: str
    size: int = 0
    name: str = "run"
    shards: int = 8
    batch: int = 64
    steps: int = NEVER
    seed: int = 0
    compression: str = "none"
    downlink: str = ""  # parameters
    reduce: Reduce = "auto"
    checkpoint_every: int = NEVER
    workers: int = 0
    marks: str = ""
    chase: Chase | None = None
    go_back: tuple[int, int] | None = None
    hold: bool = False
    meter: bool = False
    backups: int = 0


class Ranks(msgspec.Struct, frozen=True):
    """How DDP runs the same work.

    Attributes:
        hook: "none", "fp16" or "powersgd" (rank 1, from step 2).
        interface: that gloo uses.
        host, port: where rank 0 listens.
    """

    plan: Plan
    hook: str = "none"
    interface: str = "lo"
    host: str = "127.0.0.1"
    port: int = 0
    count: int = 2


def encode(told: Plan | Ranks) -> dict[str, str]:
    """The environment that tells a process of it."""
    return {VARIABLE: msgspec.json.encode(told).decode()}


def read_plan() -> Plan:
    """What this process was told."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Plan)


def read_ranks() -> Ranks:
    """What this rank was told."""
    return msgspec.json.decode(os.environ[VARIABLE], type=Ranks)
