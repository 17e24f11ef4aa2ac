"""The measurements of one side: each on a server of its own, empty before it."""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import slots
from benchmarks.peers import handlers
from benchmarks.processes import Children, SideFailed, Worker
from benchmarks.servers import Server
from benchmarks.sides import Measure, Side

POLL = 0.01
MOST_TASKS = 2_000_000  # 64 MB of slots, and a queue that still fits in memory
STOP_PATIENCE = 3.0  # after SIGTERM, before what is left in Redis is counted
WARMUP = 50
TASK_OF: dict[str, str] = {
    "drain": "noop", "drain_results": "noop", "drain_suspending": "suspend", "sleep": "nap",
}  # fmt: skip


@dataclass(frozen=True)
class Scale:
    """How long and how much: `--quick` makes it small."""

    seconds: float = 5.5  # that a drain lasts at least
    round_trips: int = 500
    round_trip_seconds: float = 20.0
    delayed: int = 300
    delayed_waiting: int = 100_000
    persistent: bool = False


@dataclass(frozen=True)
class Drain:
    """One drain: `count` tasks queued, then one worker until nothing was left to settle."""

    count: int
    seconds: float
    submit_per_s: float
    queued_bytes_per_task: float
    keys_left: int
    stream_entries_left: int

    @property
    def per_s(self) -> float:
        """Tasks a second, from the first start until all were settled."""
        return self.count / self.seconds


def percentile(samples: Sequence[float], share: float) -> float:
    """The nearest-rank percentile; `share` in 0..1."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(len(ordered) * share) - 1)]


class Bench:
    """Measures one side. It remembers how many tasks fill the time: only a first drain is calibrated."""

    def __init__(self, side: Side, scale: Scale, folder: Path) -> None:
        self.side = side
        self.scale = scale
        self._folder = folder
        self._slots = folder / f"{side.name}.slots"
        self._counts: dict[Measure, int] = {}

    def _children(self, server: Server, measure: Measure, *, results: bool) -> Children:
        plan = self.side.plan(measure)
        return Children(self.side, self._folder, server.url, self._slots, plan, results=results)

    def repeat(self) -> dict[str, float | None]:
        """Every measurement once."""
        plain, sleeping = self.drain("drain"), self.drain("sleep")
        kept = self.drain("drain_results") if self.side.has_results else None
        suspending = self.drain("drain_suspending") if self.side.has_results and self.side.suspends else None
        drains = [drain for drain in (plain, sleeping, kept, suspending) if drain is not None]
        figures: dict[str, float | None] = {
            "drain_per_s": plain.per_s,
            "drain_results_per_s": None if kept is None else kept.per_s,
            "drain_suspending_results_per_s": None if suspending is None else suspending.per_s,
            "sleep_10ms_per_s": sleeping.per_s,
            "submit_bulk_per_s": plain.submit_per_s,
            "bytes_per_queued_task": plain.queued_bytes_per_task,
            "keys_left": plain.keys_left,
            "stream_entries_left": plain.stream_entries_left,
            "shortest_drain_s": min(drain.seconds for drain in drains),
        }
        figures.update(self.round_trip())
        return figures

    def drain(self, measure: Measure) -> Drain:
        """A drain that lasts as long as the scale asks; `measure` also says whether results are kept."""
        count = self._counts.get(measure) or self._calibrate(measure)
        drain = self._drain_once(measure, count)
        for _ in range(2):
            if drain.seconds >= 0.92 * self.scale.seconds or count == MOST_TASKS:
                break
            count = self._fill(drain)  # it was faster at length than in the calibration
            drain = self._drain_once(measure, count)
        self._counts[measure] = count
        return drain

    def _fill(self, drain: Drain) -> int:
        return min(MOST_TASKS, math.ceil(1.1 * drain.per_s * self.scale.seconds))

    def _calibrate(self, measure: Measure) -> int:
        """The number of tasks that should fill the time, by short drains that grow to about a second."""
        aim = min(1.0, self.scale.seconds / 3)
        count = 400
        while True:
            drain = self._drain_once(measure, count)
            if drain.seconds >= aim / 2 or count == MOST_TASKS:
                return self._fill(drain)
            count = min(MOST_TASKS, math.ceil(count * min(10.0, aim / drain.seconds)))

    def _drain_once(self, measure: Measure, count: int) -> Drain:
        marks = slots.create(self._slots, count)
        with Server(persistent=self.scale.persistent) as server:
            with_results = measure in ("drain_results", "drain_suspending")
            children = self._children(server, measure, results=with_results)
            empty = server.used_memory()
            submitted = children.ask("produce", TASK_OF[measure], count)["seconds"]
            queued = server.used_memory() - empty
            with children.worker() as worker:
                settled = self._wait_settled(server, worker, marks, count)
                if measure == "drain":
                    worker.stop(STOP_PATIENCE)
            keys, entries = server.key_count(), server.stream_entries() if measure == "drain" else 0
        began = min(slots.read(marks, task).first_start for task in range(count))
        marks.close()
        return Drain(count, settled - began, count / submitted, queued / count, keys, entries)

    def _wait_settled(self, server: Server, worker: Worker, marks: mmap.mmap, count: int) -> float:
        """Wait until every task has ended and the queue's keys hold nothing more; returns when (monotonic).

        The cheap look at the queue comes first: the slots are read only when they are likely to be complete.
        """
        ended = 0
        deadline = time.monotonic() + 60 + 5 * self.scale.seconds
        while True:
            pending = self.side.pending(server.client)
            now = time.monotonic()
            if pending == 0:
                ended = slots.ended_up_to(marks, ended, count)
                if ended == count:
                    return now
            if now > deadline:
                raise SideFailed(f"not settled in time: {pending} pending, task {ended} of {count} not ended")
            worker.check()
            time.sleep(POLL)

    def round_trip(self) -> dict[str, float | None]:
        """Round trips one at a time through an idle worker, and what that worker holds afterwards."""
        marks = slots.create(self._slots, max(WARMUP, self.scale.round_trips))
        with Server(persistent=self.scale.persistent) as server:
            children = self._children(server, "round_trip", results=True)
            children.ask("produce", "noop", 1)
            with children.worker() as worker:
                self._wait_settled(server, worker, marks, 1)  # the worker is up, and warm
                arguments = (WARMUP, self.scale.round_trips, self.scale.round_trip_seconds)
                samples: list[float] = children.ask("latency", *arguments)["samples"]
                time.sleep(0.5)
                worker.check()
                rss = worker.rss_mb()
        return {
            "round_trip_p50_s": percentile(samples, 0.5),
            "round_trip_p99_s": percentile(samples, 0.99),
            "idle_worker_rss_mb": rss,
        }

    def delayed_lateness(self) -> float:
        """p99 of how much later than due a delayed no-op starts, in seconds, while many others wait for later."""
        count = self.scale.delayed
        marks = slots.create(self._slots, count)
        with Server(persistent=self.scale.persistent) as server:
            children = self._children(server, "delayed", results=False)
            with children.worker() as worker:
                arguments = ("noop", count, 1.0, self.scale.delayed_waiting)
                due: list[float] = children.ask("delayed", *arguments)["due"]
                self._wait_settled(server, worker, marks, count)
        late = [slots.read(marks, task).first_start - due[task] for task in range(count)]
        marks.close()
        return percentile(late, 0.99)

    def recovery_after_kill(self, count: int = 400) -> float:
        """Seconds from the SIGKILL of one of two workers amid 50 ms tasks until its last orphan has started again.

        An orphan is a task that had started when its worker died and that nobody else ended in its time. No task
        may be lost: it waits until every one has ended and is settled, or raises SideFailed.
        """
        marks = slots.create(self._slots, count)
        with Server(persistent=self.scale.persistent) as server:
            children = self._children(server, "recovery", results=True)
            with children.worker() as survivor, children.worker() as doomed:
                children.ask("produce", "slow", count)
                deadline = time.monotonic() + 60
                while sum(slots.read(marks, task).ends > 0 for task in range(count)) < count // 2:
                    doomed.check()
                    if time.monotonic() > deadline:
                        raise SideFailed("the worker that was to be killed did not get half-way within 60 s")
                    time.sleep(0.005)
                doomed.kill()
                killed = time.monotonic()
                at_kill = [slots.read(marks, task) for task in range(count)]
                running = [task for task, slot in enumerate(at_kill) if slot.starts and not slot.ends]
                self._wait_settled(server, survivor, marks, count)
        ends = {task: slots.read(marks, task) for task in running}
        marks.close()
        orphans = [slot.last_end for slot in ends.values() if slot.starts > 1]
        if not orphans:
            raise SideFailed("no task was running in the killed worker")
        return max(orphans) - handlers.SLOW - killed
