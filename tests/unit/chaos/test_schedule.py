"""The schedule of the chaos run: the same for the same seed, and with every kind of fault that applies."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.chaos.schedule import CALM, TOPOLOGIES, Kind, TopologyName, draw_schedule, plans_of

PRIMARY_LOSS = {Kind.PRIMARY_KILL, Kind.PRIMARY_STOP, Kind.PRIMARY_RESTART}


def test_a_seed_gives_one_schedule() -> None:
    first = draw_schedule(7, 60, "cluster")
    assert first == draw_schedule(7, 60, "cluster")
    assert first != draw_schedule(8, 60, "cluster")


def test_primary_loss_moves_no_other_fault() -> None:
    with_loss = draw_schedule(7, 60, "sentinel", primary_loss=True)
    assert [fault for fault in with_loss if fault.kind not in PRIMARY_LOSS] == draw_schedule(
        7, 60, "sentinel"
    )


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_every_kind_comes_at_least_once_in_a_short_run_and_many_times_in_a_long_one(
    topology: TopologyName,
) -> None:
    for seed in range(20):
        short = Counter(fault.kind for fault in draw_schedule(seed, 8, topology))
        long = Counter(fault.kind for fault in draw_schedule(seed, 60, topology))
        assert set(short) == set(long) == set(plans_of(topology, primary_loss=False))
        assert min(long.values()) >= 3


def test_without_the_flag_no_primary_is_lost_by_restart_either() -> None:
    for topology in ("sentinel", "cluster"):
        kinds = set(plans_of(topology, primary_loss=False))
        assert not kinds & (PRIMARY_LOSS | {Kind.SERVER_RESTART, Kind.SERVER_STOP})


def test_faults_come_in_order_and_leave_a_calm_end() -> None:
    times = [fault.at for fault in draw_schedule(7, 60, "cluster", primary_loss=True)]
    assert times == sorted(times)
    assert times[0] > 0
    assert times[-1] < 60 - CALM
