"""The benchmark of load and depth, each part of it small: that it measures what it says, and that nothing is lost."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
import redis

from benchmarks.depth import recovery
from benchmarks.depth.balance import measure_balance
from benchmarks.depth.beside import TTL, Load, measure_beside
from benchmarks.depth.beside import Scale as BesideScale
from benchmarks.depth.crowd import Crowd
from benchmarks.depth.delay import Delay
from benchmarks.depth.drains import drain_rate
from benchmarks.depth.soak import soak
from benchmarks.depth.trend import growth
from benchmarks.depth.wire import drain_through
from benchmarks.sides import Side, ours
from taskmesh.testing import RedisServer
from tests.conftest import MakeMesh


@pytest.fixture
def side() -> Side:
    found = ours()
    assert found is not None
    return found


def test_the_proxy_adds_its_delay_and_keeps_every_byte(server: RedisServer) -> None:
    blob = random.Random(3).randbytes(3_000_000)
    with Delay(server.port, 0.01) as delay, redis.Redis.from_url(delay.url) as client:
        client.ping()
        began = time.perf_counter()
        client.ping()
        assert time.perf_counter() - began >= 0.02
        client.set("blob", blob)
        assert client.get("blob") == blob
        client.delete("blob")


async def test_a_connection_knows_how_long_its_wire_is(make_mesh: MakeMesh, server: RedisServer) -> None:
    with Delay(server.port, 0.005) as delay:
        async with make_mesh() as near, make_mesh(url=delay.url) as far:
            for mesh, least, most in ((near, 0.0, 0.009), (far, 0.01, 0.1)):
                for _ in range(20):
                    await mesh.client.caller.command(b"any", "TIME")
                assert least < mesh.client.caller.server.link(b"any").round_trip < most


def test_a_part_of_a_backlog_and_all_of_one_over_a_longer_wire(side: Side, tmp_path: Path) -> None:
    assert drain_rate(side, tmp_path, 20_000, 5_000) > 0
    assert drain_through(side, tmp_path, 2_000, 0.002) > 0


def test_work_beside_what_others_hold_and_many_leases(side: Side, tmp_path: Path) -> None:
    scale = BesideScale(drain=2_000, round_trips=20, idle_seconds=0.2)
    figures = measure_beside(side, tmp_path, scale, Load(delayed=500, held=500, workers=50))
    assert figures["drain_per_s"] > 0


def test_the_crowd_lives_while_it_is_there_and_holds_what_it_took(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client, Crowd(redis_url, TTL, 20):
        assert client.zcard("taskmesh:{bench:default:0}:workers") == 20


def test_killed_workers_tasks_start_again_and_none_is_missing() -> None:
    random.seed(20)
    found = recovery.measure_recovery(2.0, kills=2)
    assert found["kills"] == 2
    assert found["tasks"] > 0


def test_three_partitions_lie_on_three_nodes() -> None:
    balance = measure_balance(partitions=3, tasks=1_500)
    assert all(balance.operations)
    assert balance.max_by_mean < 1.5


def test_a_soak_ends_with_nothing_left() -> None:
    account = soak(minutes=0.05, rate=2_000)
    assert account["submitted"] > 0


def test_growth_is_told_from_noise() -> None:
    draw = random.Random(1)
    times = [float(second) for second in range(600)]
    flat = growth(times, [50 + draw.gauss(0, 1) for _ in times])
    rising = growth(times, [50 + 0.01 * second + draw.gauss(0, 1) for second in times])
    assert flat.is_noise
    assert not rising.is_noise
    assert rising.growth == pytest.approx(6, abs=0.5)
