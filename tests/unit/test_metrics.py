"""The name table, and the observer that counts."""

from __future__ import annotations

import re
import threading

from taskmesh import Mesh
from taskmesh.events import (
    Checkpointed,
    Claimed,
    Committed,
    Ending,
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
from taskmesh.monitoring import METRICS, CountingObserver, Histogram, Kind, Level, metrics

UNITS = {"bytes", "seconds", "total", "ratio"}
COUNTED_THINGS = {
    "alive",
    "clients",
    "waiting",
    "pending",
    "delayed",
    "dead",
    "parked",
    "size",
    "loss",
    "version",
}


def test_the_names_follow_prometheus() -> None:
    for name, metric in METRICS.items():
        assert name == metric.name
        assert re.fullmatch(r"taskmesh_[a-z]+(_[a-z]+)*", name)
        assert (metric.kind is Kind.COUNTER) == name.endswith("_total"), name
        assert name.rpartition("_")[2] in UNITS | COUNTED_THINGS, f"{name} names no unit"
        assert metric.help.endswith("."), name
        assert bool(metric.bounds) == (metric.kind is Kind.HISTOGRAM), name
        assert list(metric.bounds) == sorted(set(metric.bounds)), name


def test_each_level_has_metrics() -> None:
    assert {metric.level for metric in METRICS.values()} == set(Level)


def test_a_mesh_counts_by_default() -> None:
    mesh = Mesh("shop")
    mesh.observers.emit(Submitted("default", 3, 120))
    assert mesh.metrics.snapshot() == {
        metrics.SUBMITTED: {("default",): 3},
        metrics.SUBMITTED_BYTES: {("default",): 120},
    }


def test_nothing_is_reported_that_never_happened() -> None:
    assert CountingObserver().snapshot() == {}


def test_settled_batches() -> None:
    observer = CountingObserver()
    observer.on_event(
        Settled("mail", [Ending("send", "succeeded", 0.02), Ending("send", "failed", 3.0)], 0, 0.004)
    )
    observer.on_event(
        Settled("mail", [Ending("send", "succeeded", 0.03), Ending("", "undecodable", 0.0)], 1, 0.002)
    )
    seen = observer.snapshot()
    assert seen[metrics.SETTLED] == {
        ("mail", "send", "succeeded"): 2,
        ("mail", "send", "failed"): 1,
        ("mail", "", "undecodable"): 1,
    }
    durations = seen[metrics.TASK_SECONDS]
    assert set(durations) == {("mail", "send")}  # what never ran has no duration
    ran = durations["mail", "send"]
    assert isinstance(ran, Histogram)
    assert ran.count == 3
    assert abs(ran.total - 3.05) < 1e-9
    assert seen[metrics.DROPPED] == {("mail",): 1}
    batches = seen[metrics.SETTLE_BATCH]["mail",]
    assert isinstance(batches, Histogram)
    assert (batches.count, batches.total) == (2, 4)


def test_the_other_events() -> None:
    observer = CountingObserver()
    for event in (
        Fetched("mail", 5),
        Fetched("mail", 2),
        Claimed("mail", "worker-1", 4),
        WorkerLost("worker-2"),
        Committed("digits", 7, 6, 0.5, 0.1, 100, 400),
        Committed("digits", 8, 7, 0.25, 0.1, 100, 400),
        ShardRefused("digits", 7, 3, "worker-1", "not finite"),
        ShardRepeated("digits", 7, 2, "worker-1", 0.5),
        ShardsLate("digits", 7, (2, 5), 64, 3),
        Checkpointed("digits", 8, 7, 0.3, 400, 100, 0.0, 0.01),
        MirrorFailed("digits", 8, "no such bucket"),
        RolledBack("digits", 9, 5, "loss spike"),
    ):
        observer.on_event(event)
    seen = observer.snapshot()
    assert set(seen) <= set(METRICS)
    assert seen[metrics.FETCHED] == {("mail",): 7}
    assert seen[metrics.CLAIMED] == {("mail",): 4}
    assert seen[metrics.STRUCK_OFF] == {(): 1}
    assert seen[metrics.STEPS] == {("digits",): 2}
    assert seen[metrics.LOSS] == {("digits",): 0.25}
    assert seen[metrics.VERSION] == {("digits",): 9}
    assert seen[metrics.UPLINK_BYTES] == {("digits",): 200}
    assert seen[metrics.DENSE_BYTES] == {("digits",): 800}
    assert seen[metrics.SHARDS_REFUSED] == {("digits",): 1}
    assert seen[metrics.SHARDS_REPEATED] == {("digits",): 1}
    assert seen[metrics.SHARDS_LATE] == {("digits",): 2}
    assert seen[metrics.CHECKPOINTS] == {("digits",): 1}
    assert seen[metrics.CHECKPOINT_BYTES] == {("digits",): 100}
    took = seen[metrics.CHECKPOINT_SECONDS]["digits",]
    assert isinstance(took, Histogram)
    assert (took.count, took.total) == (1, 0.3)
    assert seen[metrics.MIRROR_FAILURES] == {("digits",): 1}
    assert seen[metrics.ROLLBACKS] == {("digits",): 1}


def test_bounds_are_inclusive_and_the_last_bucket_is_open() -> None:
    observer = CountingObserver()
    observer.on_event(
        Settled("q", [Ending("t", "succeeded", s) for s in (0.0, 0.0005, 0.0006, 1e6)], 0, 0.001)
    )
    ran = observer.snapshot()[metrics.TASK_SECONDS]["q", "t"]
    assert isinstance(ran, Histogram)
    assert ran.counts[:2] == (2, 1)
    assert ran.counts[-1] == 1
    assert len(ran.counts) == len(ran.bounds) + 1


def test_quantiles() -> None:
    histogram = Histogram((1.0, 2.0, 4.0), (5, 4, 0, 1), 20.0)
    assert histogram.quantile(0.5) == 1.0
    assert histogram.quantile(0.9) == 2.0
    assert histogram.quantile(1.0) == float("inf")
    assert Histogram((1.0,), (0, 0), 0.0).quantile(0.5) == 0.0


def test_snapshots_may_be_taken_from_another_thread() -> None:
    observer = CountingObserver()
    done = threading.Event()
    failures: list[Exception] = []

    def look() -> None:
        while not done.is_set():
            try:
                observer.snapshot()
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(2000):
        observer.on_event(Settled(f"q{number}", [Ending(f"t{number}", "failed", 0.1)], 1, 0.001))
    done.set()
    thread.join()
    assert not failures
