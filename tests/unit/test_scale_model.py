"""The scale model's pure parts: what is fitted comes out as it went in, and predictions keep to what must hold."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from benchmarks.scale.fit import Coefficients, fit, predict, solve, stages_of
from benchmarks.scale.measure import Measured, check, describe_machine, mean_error, model_of, read, write
from benchmarks.scale.parts import METHODS as COMPRESSIONS
from benchmarks.scale.parts import Parts, Way
from benchmarks.scale.predict import METHODS, Cluster, curve, load_of, predict_step, worker_counts
from benchmarks.scale.report import figures, in_words
from benchmarks.scale.runs import Observed
from benchmarks.scale.settings import FULL, Setting
from benchmarks.scale.topologies import TOPOLOGIES, Load, per_host, ring, sharded, star, torus, tree

PARTS = Parts(
    send=Way(1e-10, 2e-5),
    receive=Way(2e-10, 1e-5),
    take_in=Way(1.5e-10, 2e-5),
    give_out=Way(3e-10, 1e-5),
    add=4e-11,
    pack={"none": 5e-11, "int8": 4e-10, "topk_1%": 5e-10},
    unpack={"none": 5e-11, "int8": 1e-10, "topk_1%": 6e-11},
    share={"none": 1.0, "int8": 0.25, "topk_1%": 0.008},
    cores=2,
)
FOUND = Coefficients(
    begin_step_s=1.2e-3,
    check_s_per_byte=1.3e-10,
    unhidden=0.3,
    slower=0.9,
    round_s=8e-4,
    gradient_step_s=2e-4,
    optimizer_step_s=1e-4,
    optimizer_s_per_byte=6e-11,
    commit_step_s=7e-4,
    commit_s_per_byte=4e-10,
    task_s={"master": 5e-4, "workers": 4e-4, "servers": 2e-4},
)
ALONE_S = 1e-3
DENSE = 4e8
LINKS = (1.0, 10.0, 100.0)
COUNTS = worker_counts(8)


def _observed(setting: Setting) -> Observed:
    """What a run would come to that is just as the model says."""
    size, sharing = setting.dense_bytes, max(1.0, setting.workers / PARTS.cores)
    parts_s = {
        "publish": FOUND.begin_step_s,
        "parameters": FOUND.check_s_per_byte * size * sharing,
        "optimizer": FOUND.optimizer_step_s + FOUND.optimizer_s_per_byte * size,
        "commit": FOUND.commit_step_s + FOUND.commit_s_per_byte * size,
    }
    alone = {"workers": ALONE_S}
    busy_s = {
        role: 1e-3 + setting.shards * (task + alone.get(role, 0.0)) for role, task in FOUND.task_s.items()
    }
    return Observed(setting, predict(setting, ALONE_S, PARTS, FOUND), ALONE_S, parts_s, busy_s)


def _load(workers: int, compression: str = "none") -> Load:
    share = PARTS.share[compression]
    return Load(workers, 8, DENSE, DENSE * share, DENSE, is_sparse=compression.startswith("topk"))


# the fit


def test_coefficients_come_out_as_they_went_in() -> None:
    found = fit([_observed(setting) for setting in FULL.fitted], PARTS)
    assert found.task_s == pytest.approx(FOUND.task_s)
    for name in Coefficients.__struct_fields__:
        if name != "task_s":
            assert getattr(found, name) == pytest.approx(getattr(FOUND, name), rel=1e-4), name


def test_a_run_that_was_held_out_is_predicted() -> None:
    found = fit([_observed(setting) for setting in FULL.fitted], PARTS)
    checks = check([_observed(setting) for setting in FULL.held_out], PARTS, found)
    assert mean_error(checks) < 1e-6


def test_no_coefficient_is_negative() -> None:
    rows = [{"fixed": 1.0, "each": float(count)} for count in (1, 2, 3)]
    assert solve(rows, [3.0, 2.0, 1.0], [1.0, 1.0, 1.0]) == {"fixed": pytest.approx(2.0), "each": 0.0}


def test_all_that_runs_on_one_machine_shares_its_cores() -> None:
    stages = stages_of(Setting(8_000_000, 2, 2), 0.0, PARTS, FOUND.task_s)
    assert stages.machine * PARTS.cores == pytest.approx(
        2 * stages.workers + 2 * stages.sending + stages.servers + stages.master
    )
    assert stages.longest == stages.machine
    waiting = stages_of(Setting(8_000_000, 2, 2, compute_s=0.1), 0.0, PARTS, FOUND.task_s)
    assert waiting.longest == waiting.workers == pytest.approx(stages.workers + 0.1)
    assert waiting.shorter == pytest.approx(stages.sending + stages.servers + stages.master)


# bytes


@pytest.mark.parametrize("workers", COUNTS)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_sent_arrives(workers: int, compression: str) -> None:
    load = _load(workers, compression)
    through_one = star(load)
    assert through_one.sent == through_one.server == through_one.received == workers * load.up
    spread = sharded(load)
    assert spread.received * load.hosts == pytest.approx(spread.sent) == workers * load.up
    assert spread.added * load.hosts == pytest.approx(workers * load.dense)


def test_a_version_is_fetched_once_a_host() -> None:
    load = _load(64)
    assert star(load).down_server == per_host(load).down_server == 8 * load.down
    assert sharded(load).down_wire == tree(load).down_wire == load.down


@pytest.mark.parametrize("workers", COUNTS)
def test_hosts_of_one_worker_are_a_star(workers: int) -> None:
    load = _load(workers)._replace(per_host=1)
    assert per_host(load)._replace(local=0.0) == star(load)


def test_a_tree_that_is_wide_enough_is_no_tree() -> None:
    load = _load(64)
    assert tree(load, fan_in=8).wire == per_host(load).wire
    assert tree(load, fan_in=8).added == per_host(load).added


def test_a_tree_carries_every_hosts_sum_and_those_of_its_levels() -> None:
    assert tree(_load(512), fan_in=4).sent == (64 + 16 + 4) * DENSE


def test_a_torus_moves_what_a_ring_moves_in_fewer_messages() -> None:
    square = _load(16 * 8)
    assert torus(square).wire == pytest.approx(2 * 15 / 16 * DENSE)  # 16 hosts, 4 x 4
    assert torus(square).messages == 12
    assert ring(square._replace(per_host=1)).wire == pytest.approx(2 * 127 / 128 * DENSE)
    assert ring(square).messages == 254


def test_a_sum_of_sparse_gradients_is_never_more_than_dense() -> None:
    load = _load(1_000, "topk_1%")
    assert load.summed(8) == 8 * load.up
    assert load.summed(1_000) == load.dense


# predictions


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("method", METHODS)
def test_a_faster_link_is_never_slower_and_no_step_shorter_than_its_computing(
    topology: str, method: str
) -> None:
    slow, middle, fast = (
        curve(topology, Cluster(100_000_000, link), method, COUNTS, PARTS, FOUND) for link in LINKS
    )
    for one, other, best in zip(slow, middle, fast, strict=True):
        assert one.step_s >= other.step_s >= best.step_s
        assert 0 < best.efficiency < 1


@pytest.mark.parametrize("topology", ["star", "per host", "groups", "DDP ring"])
def test_more_workers_never_step_faster(topology: str) -> None:
    for link in LINKS:
        found = curve(topology, Cluster(100_000_000, link), "fp32", COUNTS, PARTS, FOUND)
        assert all(fewer.step_s <= more.step_s * (1 + 1e-9) for fewer, more in itertools.pairwise(found))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("better", ["per host", "sharded", "sharded, per host", "tree", "groups"])
def test_with_many_workers_every_topology_is_ahead_of_the_star(link: float, better: str) -> None:
    cluster, many = Cluster(100_000_000, link), [64, 256, 1_000]
    of_star = curve("star", cluster, "fp32", many, PARTS, FOUND)
    others = curve(better, cluster, "fp32", many, PARTS, FOUND)
    assert all(other.step_s < one.step_s for one, other in zip(of_star, others, strict=True))


def test_fewer_bytes_and_fewer_rounds_are_faster_over_a_slow_link() -> None:
    cluster = Cluster(100_000_000, 1.0)
    names = ("fp32", "int8", "int8 both ways", "Top-K 1% both ways")
    steps = [predict_step(star, cluster, METHODS[name], 64, PARTS, FOUND).step_s for name in names]
    assert steps == sorted(steps, reverse=True)
    few, many = (
        predict_step(star, cluster, METHODS[name], 64, PARTS, FOUND) for name in ("fp32", "DiLoCo 20")
    )
    assert few.step_s / 25 < many.step_s < few.step_s / 10


def test_what_bounds_a_star_over_a_slow_link_is_the_wire() -> None:
    cluster = Cluster(100_000_000, 1.0)
    found = predict_step(star, cluster, METHODS["fp32"], 1_000, PARTS, FOUND)
    assert found.bound_by == "wire"
    load = load_of(cluster, METHODS["fp32"], 1_000, PARTS)
    assert found.step_s > 1_000 * load.up / cluster.link


# what is printed, kept and drawn


@pytest.fixture
def measured() -> Measured:
    fitted, held_out = (tuple(map(_observed, settings)) for settings in (FULL.fitted, FULL.held_out))
    return Measured(PARTS, fitted, held_out, describe_machine())


def test_what_was_measured_is_kept_and_told(measured: Measured, tmp_path: Path) -> None:
    kept = tmp_path / "measured.json"
    write(measured, kept)
    assert read(kept) == measured
    told = json.loads(json.dumps(figures(model_of(measured))))
    assert told["held_out_largest_error"] == pytest.approx(0.0, abs=1e-6)
    by_way = told["predictions"]["100000000"]["10gbit"]["step_s"]
    assert set(by_way["star, fp32"]) == {str(count) for count in COUNTS}
    assert "sharded, per host, DiLoCo 20" in in_words(model_of(measured))


def test_the_curves_are_drawn(measured: Measured, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from benchmarks.scale.picture import draw

    draw(model_of(measured), tmp_path / "curves.svg")
    assert "DDP ring" in (tmp_path / "curves.svg").read_text()
