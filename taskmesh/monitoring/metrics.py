"""What is measured: the one table of names, and the observer that counts.

Three levels: the system (machines, memory, bytes), the framework (queues, deliveries, settling, gradients) and
the business (loss, versions). Names are Prometheus's way, with their unit; counters end in ``_total``. Counters and
histograms come from a process's own events (``CountingObserver``); gauges describe the whole Mesh and come from
the server (``taskmesh.monitoring.snapshot``).
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from taskmesh.events import (
    Checkpointed,
    Claimed,
    Committed,
    Event,
    Fetched,
    MirrorFailed,
    RolledBack,
    Settled,
    ShardRefused,
    ShardRepeated,
    ShardsLate,
    Submitted,
    WorkerLost,
)
from taskmesh.messages import Status

SECONDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0)


class Level(StrEnum):
    """Whom a metric speaks to."""

    SYSTEM = "system"
    FRAMEWORK = "framework"
    BUSINESS = "business"


class Kind(StrEnum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One line of the table.

    Attributes:
        labels: their names; samples are keyed by their values in this order.
        bounds: the upper bounds of a histogram's buckets, inclusive, without the infinite one.
    """

    name: str
    level: Level
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


METRICS: dict[str, Metric] = {}


def _define(
    name: str, level: Level, kind: Kind, help: str, labels: Sequence[str] = (), bounds: tuple[float, ...] = ()
) -> str:
    METRICS[name] = Metric(name, level, kind, help, tuple(labels), bounds)
    return name


_S, _F, _B = Level.SYSTEM, Level.FRAMEWORK, Level.BUSINESS
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

WORKERS_ALIVE = _define("taskmesh_workers_alive", _S, _G, "Workers heard of within the liveness TTL.")
MEMORY_USED = _define("taskmesh_server_memory_used_bytes", _S, _G, "Memory that a server uses.", ["server"])
MEMORY_LIMIT = _define("taskmesh_server_memory_limit_bytes", _S, _G, "Its limit; 0 is none.", ["server"])
CLIENTS = _define("taskmesh_server_clients", _S, _G, "Connections that a server holds.", ["server"])
SUBMITTED_BYTES = _define("taskmesh_submitted_bytes_total", _S, _C, "Bytes of accepted messages.", ["queue"])
UPLINK_BYTES = _define(
    "taskmesh_run_uplink_bytes_total", _S, _C, "Bytes of gradients as they were sent.", ["run"]
)
DENSE_BYTES = _define(
    "taskmesh_run_dense_bytes_total", _S, _C, "Bytes that the same gradients have uncompressed.", ["run"]
)

SUBMITTED = _define("taskmesh_tasks_submitted_total", _F, _C, "Messages that the server accepted.", ["queue"])
FETCHED = _define("taskmesh_deliveries_fetched_total", _F, _C, "Deliveries that workers received.", ["queue"])
CLAIMED = _define(
    "taskmesh_deliveries_claimed_total",
    _F,
    _C,
    "Deliveries taken over from the dead or handed back.",
    ["queue"],
)
SETTLED = _define(
    "taskmesh_tasks_settled_total", _F, _C, "Deliveries that ended, by how.", ["queue", "task", "status"]
)
DROPPED = _define("taskmesh_outcomes_dropped_total", _F, _C, "Outcomes that had lost their claim.", ["queue"])
STRUCK_OFF = _define(
    "taskmesh_workers_struck_off_total", _F, _C, "Times that a worker found itself struck off."
)
TASK_SECONDS = _define(
    "taskmesh_task_duration_seconds", _F, _H, "How long handlers ran.", ["queue", "task"], SECONDS
)
SETTLE_SECONDS = _define(
    "taskmesh_settle_duration_seconds", _F, _H, "Settle round trips.", ["queue"], SECONDS
)
SETTLE_BATCH = _define(
    "taskmesh_settle_batch_size", _F, _H, "Deliveries ended by one settle.", ["queue"], COUNTS
)
WAITING = _define("taskmesh_queue_waiting", _F, _G, "Messages that no worker has yet.", ["queue", "lane"])
PENDING = _define("taskmesh_queue_pending", _F, _G, "Messages that workers hold.", ["queue", "lane"])
DELAYED = _define("taskmesh_queue_delayed", _F, _G, "Messages that are due later.", ["queue"])
DEAD = _define("taskmesh_queue_dead", _F, _G, "Dead letters.", ["queue"])
PARKED = _define("taskmesh_queue_parked", _F, _G, "Messages whose task no live worker knows.", ["queue"])
OLDEST_AGE = _define(
    "taskmesh_queue_oldest_age_seconds",
    _F,
    _G,
    "Age of the oldest message that no worker has yet.",
    ["queue"],
)
STEPS = _define("taskmesh_run_steps_total", _F, _C, "Training steps committed.", ["run"])
STEP_SECONDS = _define("taskmesh_run_step_duration_seconds", _F, _H, "Plan to commit.", ["run"], SECONDS)
SHARDS_REFUSED = _define(
    "taskmesh_run_shards_refused_total", _F, _C, "Gradient shards that were not used.", ["run"]
)
SHARDS_REPEATED = _define(
    "taskmesh_run_shards_repeated_total", _F, _C, "Late gradient shards given to a second worker.", ["run"]
)
SHARDS_LATE = _define(
    "taskmesh_run_shards_late_total", _F, _C, "Gradient shards that a step was taken without.", ["run"]
)
ROLLBACKS = _define("taskmesh_run_rollbacks_total", _F, _C, "Rollbacks.", ["run"])
CHECKPOINTS = _define("taskmesh_run_checkpoints_total", _F, _C, "Checkpoints completed.", ["run"])
CHECKPOINT_SECONDS = _define(
    "taskmesh_run_checkpoint_duration_seconds", _F, _H, "Commit to complete checkpoint.", ["run"], SECONDS
)
CHECKPOINT_BYTES = _define(
    "taskmesh_run_checkpoint_bytes_total", _S, _C, "Bytes of checkpoints that were written.", ["run"]
)
MIRROR_FAILURES = _define(
    "taskmesh_run_mirror_failures_total", _F, _C, "Checkpoints that a mirror did not get.", ["run"]
)

LOSS = _define("taskmesh_run_loss", _B, _G, "Loss of the last committed step.", ["run"])
VERSION = _define("taskmesh_run_version", _B, _G, "The current version of the parameters.", ["run"])


@dataclass(frozen=True, slots=True)
class Histogram:
    """Observations by bucket.

    Attributes:
        bounds: upper bounds, inclusive.
        counts: one for each bound and a last one above them; not cumulated.
        total: the sum of what was observed.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """The upper bound of the bucket that holds this quantile (infinite above the last; 0.0 without any)."""
        wanted, seen = share * self.count, 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            if count and seen >= wanted:
                return bound
        return 0.0


Samples = dict[str, dict[tuple[str, ...], float | Histogram]]
"""Metric name -> label values, in the order of the table -> value."""


def _cells(bounds: tuple[float, ...]) -> Callable[[], list[Any]]:
    """Makes a histogram under way: a count for each bucket, then the sum."""
    return lambda: [0] * (len(bounds) + 1) + [0.0]


def _histogram(bounds: tuple[float, ...], *cells: Sequence[Any]) -> Histogram:
    *counts, total = map(sum, zip(*cells, strict=True))
    return Histogram(bounds, tuple(counts), total)


_SUCCEEDED = Status.SUCCEEDED.value
_RAN = (_SUCCEEDED, Status.FAILED.value, Status.RETRIED.value)  # the others ended without their handler


class CountingObserver:
    """Counts what a process does; every Mesh has one (``mesh.metrics``).

    Made for the hot path: one call a settled batch, and for each task in it one look-up and one bisection.
    ``snapshot`` may be called from any thread.
    """

    def __init__(self) -> None:
        # How long handlers ran, by queue and then by task; how often they did is the sum over the buckets.
        # Successes are apart, for one look-up by a plain name.
        self._succeeded: defaultdict[str, defaultdict[str, list[Any]]] = defaultdict(
            lambda: defaultdict(_cells(SECONDS))
        )
        self._others: defaultdict[tuple[str, str, str], list[Any]] = defaultdict(_cells(SECONDS))
        self._settles: defaultdict[str, list[Any]] = defaultdict(_cells(SECONDS))
        self._batches: defaultdict[str, list[Any]] = defaultdict(_cells(COUNTS))
        self._checkpoints: defaultdict[str, list[Any]] = defaultdict(_cells(SECONDS))
        self._steps: defaultdict[str, list[Any]] = defaultdict(_cells(SECONDS))
        self._counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._gauges: dict[tuple[str, str], float] = {}
        self._struck_off = 0

    def on_event(self, event: Event) -> None:
        if type(event) is Settled:
            self._settled(event)
            return
        counts = self._counts
        match event:
            case Fetched():
                counts[FETCHED, event.queue] += event.deliveries
            case Submitted():
                counts[SUBMITTED, event.queue] += event.messages
                counts[SUBMITTED_BYTES, event.queue] += event.size_bytes
            case Claimed():
                counts[CLAIMED, event.queue] += event.deliveries
            case WorkerLost():
                self._struck_off += 1
            case Committed():
                counts[STEPS, event.run] += 1
                counts[UPLINK_BYTES, event.run] += event.uplink_bytes
                counts[DENSE_BYTES, event.run] += event.dense_bytes
                _observe(self._steps[event.run], SECONDS, event.seconds)
                self._gauges[LOSS, event.run] = event.loss
                self._gauges[VERSION, event.run] = event.version
            case ShardRefused():
                counts[SHARDS_REFUSED, event.run] += 1
            case ShardRepeated():
                counts[SHARDS_REPEATED, event.run] += 1
            case ShardsLate():
                counts[SHARDS_LATE, event.run] += len(event.shards)
            case Checkpointed():
                counts[CHECKPOINTS, event.run] += 1
                counts[CHECKPOINT_BYTES, event.run] += event.written_bytes
                _observe(self._checkpoints[event.run], SECONDS, event.seconds)
            case MirrorFailed():
                counts[MIRROR_FAILURES, event.run] += 1
            case RolledBack():
                counts[ROLLBACKS, event.run] += 1
                self._gauges[VERSION, event.run] = event.version

    def _settled(self, event: Settled) -> None:
        queue, endings = event.queue, event.endings
        cells = self._succeeded[queue]
        for ending in endings:
            seconds = ending.seconds
            if ending.status == _SUCCEEDED:
                cell = cells[ending.task]
            else:
                cell = self._others[queue, ending.task, ending.status]
            cell[bisect_left(SECONDS, seconds)] += 1
            cell[-1] += seconds
        _observe(self._settles[queue], SECONDS, event.seconds)
        _observe(self._batches[queue], COUNTS, len(endings))
        if event.dropped:
            self._counts[DROPPED, queue] += event.dropped

    def snapshot(self) -> Samples:
        """Everything counted so far; nothing that never happened."""
        samples: Samples = {}
        settled = [(key, cell) for key, cell in _items(self._others)]
        for queue, cells in _items(self._succeeded):
            settled += [((queue, task, _SUCCEEDED), cell) for task, cell in _items(cells)]
        ran: defaultdict[tuple[str, str], list[list[Any]]] = defaultdict(list)
        for (queue, task, status), cell in settled:
            samples.setdefault(SETTLED, {})[queue, task, status] = sum(cell[:-1])
            if status in _RAN:
                ran[queue, task].append(cell)
        for key, group in ran.items():
            samples.setdefault(TASK_SECONDS, {})[key] = _histogram(SECONDS, *group)
        for name, bounds, histograms in (
            (SETTLE_SECONDS, SECONDS, self._settles),
            (SETTLE_BATCH, COUNTS, self._batches),
            (STEP_SECONDS, SECONDS, self._steps),
            (CHECKPOINT_SECONDS, SECONDS, self._checkpoints),
        ):
            for label, cell in _items(histograms):
                samples.setdefault(name, {})[label,] = _histogram(bounds, cell)
        for (name, label), value in [*_items(self._counts), *_items(self._gauges)]:
            samples.setdefault(name, {})[label,] = value
        if self._struck_off:
            samples[STRUCK_OFF] = {(): float(self._struck_off)}
        return samples


def _items(counters: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The items as they stand, while another thread may add some."""
    while True:
        try:
            return list(counters.items())
        except RuntimeError:
            continue


def _observe(cell: list[Any], bounds: tuple[float, ...], value: float) -> None:
    cell[bisect_left(bounds, value)] += 1
    cell[-1] += value
