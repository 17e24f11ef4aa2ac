"""Half of the measured rate for a long time, results on: what grows."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.depth.app import environment
from benchmarks.depth.programs import start_feed, start_worker
from benchmarks.depth.trend import growth
from benchmarks.processes import PAGE_BYTES, SideFailed
from benchmarks.servers import Server
from taskmesh.keys import PartitionKeys

LONGEST_RESULT_TTL = 5.0
RESULT_TTL_SHARE = 0.1  # of the run: within the warm-up, what is kept must come to stay the same
WARM_UP_SHARE = 0.2
LONGEST_WARM_UP = 120.0
SAMPLE_SECONDS = 0.5
START_LIMIT = 30.0
DRAIN_LIMIT = 30.0
MB = 1e6


@dataclass(frozen=True)
class Sample:
    """One look; ``at`` is monotonic seconds."""

    at: float
    worker_rss_mb: float
    server_memory_mb: float
    backlog: int


def soak(minutes: float, rate: float) -> dict[str, Any]:
    """Feed one worker at that rate and look at its memory and the server's; ``minutes`` do not count the warm-up.

    Raises:
        SideFailed: a process ended, or the backlog did not run down at the end.
    """
    with Server() as server:
        ttl = min(LONGEST_RESULT_TTL, RESULT_TTL_SHARE * minutes * 60)
        told = environment(server.url, result_ttl=ttl)
        worker = start_worker(told)
        feed = start_feed(told, rate)
        try:
            _await_traffic(server.client)
            _watch(server, worker.pid, min(LONGEST_WARM_UP, WARM_UP_SHARE * minutes * 60))
            samples = _watch(server, worker.pid, minutes * 60)
            fed, _ = feed.communicate(timeout=DRAIN_LIMIT + 60)
            _await_empty(server.client)
            if worker.poll() is not None or feed.returncode:
                raise SideFailed(
                    f"the worker or the feed ended (exit {worker.returncode}, {feed.returncode})"
                )
        finally:
            for process in (feed, worker):
                process.kill()
                process.wait()
    return _account(minutes, rate, samples, json.loads(fed))


def _watch(server: Server, pid: int, seconds: float) -> list[Sample]:
    samples = []
    began = time.monotonic()
    while (now := time.monotonic()) < began + seconds:
        samples.append(Sample(now, _rss_mb(pid), server.used_memory() / MB, _backlog(server.client)))
        time.sleep(SAMPLE_SECONDS)
    return samples


def _rss_mb(pid: int) -> float:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES / MB
    except OSError:
        raise SideFailed("the worker has ended") from None


def _backlog(client: redis.Redis) -> int:
    return sum(client.xlen(lane) for lane in PartitionKeys("depth", "default", 0).lanes)


def _await_traffic(client: redis.Redis) -> None:
    give_up_at = time.monotonic() + START_LIMIT
    results = PartitionKeys("depth", "default", 0).prefix + b"result:*"
    while not any(client.scan(match=results)[1]):
        if time.monotonic() > give_up_at:
            raise SideFailed(f"no task had ended {START_LIMIT:.0f} s after the start")
        time.sleep(0.05)


def _await_empty(client: redis.Redis) -> None:
    give_up_at = time.monotonic() + DRAIN_LIMIT
    while left := _backlog(client):
        if time.monotonic() > give_up_at:
            raise SideFailed(f"{left} tasks were left {DRAIN_LIMIT:.0f} s after the last was submitted")
        time.sleep(0.05)


def _account(minutes: float, rate: float, samples: list[Sample], fed: dict[str, float]) -> dict[str, Any]:
    times = [sample.at for sample in samples]
    worker = growth(times, [sample.worker_rss_mb for sample in samples])
    server = growth(times, [sample.server_memory_mb for sample in samples])
    return {
        "minutes": minutes,
        "worker_rss_growth_mb": worker.growth,
        "worker_rss_noise_mb": worker.noise,
        "worker_rss_mb": samples[-1].worker_rss_mb,
        "server_memory_growth_mb": server.growth,
        "server_memory_noise_mb": server.noise,
        "server_memory_mb": samples[-1].server_memory_mb,
        "asked_per_s": rate,
        "per_s": fed["per_s"],
        "submitted": int(fed["submitted"]),
        "results_read": int(fed["results_read"]),
        "largest_backlog": max(sample.backlog for sample in samples),
    }
