"""The benchmark of training, each part of it small: that it measures what it says."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import msgspec
import pytest

from benchmarks.scale.fit import fit, predict
from benchmarks.scale.parts import METHODS, measure_parts
from benchmarks.scale.runs import ROLES, observe
from benchmarks.scale.settings import Setting
from benchmarks.training import crashes, namespaces
from benchmarks.training.audit import account
from benchmarks.training.dense import measure_dense
from benchmarks.training.link import measure_link
from benchmarks.training.overlap import measure_overlap
from benchmarks.training.parity import interval, measure_parity
from benchmarks.training.standby import measure_standby
from benchmarks.training.stopwatch import PARTS
from benchmarks.training.stragglers import BACKUPS, measure_step
from benchmarks.training.transport import measure_transport
from taskmesh.training import LedgerEntry
from taskmesh.training.ledger import Share
from taskmesh.training.plan import Owed

SHARES = (Share(0, "worker", "task", 1), Share(1, "worker", "task", 1))
MORE = (Share(2, "worker", "task", 1), Share(3, "worker", "task", 1))
pytestmark = pytest.mark.timeout(300)


def test_dense_steps_beside_ddp() -> None:
    figures = measure_dense(repeats=1, steps=6, parameters=40_000)
    assert all(figures[f"{side}_step_s"] for side in ("dense", "int8", "ddp"))
    parts = figures["dense_parts_s"]
    assert isinstance(parts, dict)
    assert tuple(parts) == PARTS
    assert all(seconds >= 0 for seconds in parts.values())


def test_the_parts_of_a_step_and_a_whole_one_make_a_model() -> None:
    parts = measure_parts(size_bytes=2 * 1024 * 1024, rounds=2)
    assert parts.send.seconds(1e6) > 0
    assert parts.give_out.seconds(1e6) > 0
    assert parts.share["none"] == 1.0
    assert all(0 < parts.share[name] < 1 and parts.pack[name] > 0 for name in METHODS if name != "none")
    run = observe(Setting(2_000, 1, 1, compute_s=0.02), steps=6)
    assert run.step_s > 0.02
    assert set(run.busy_s) == set(ROLES)
    assert predict(run.setting, run.alone_s, parts, fit([run], parts)) == pytest.approx(run.step_s, rel=0.5)


def test_transport_beside_a_bare_socket() -> None:
    figures = measure_transport(rounds=1, values=4)
    assert figures["transport_share_of_bare_socket"]


def test_stragglers_take_at_least_what_the_work_takes() -> None:
    assert measure_step(16, steps=2, backups=BACKUPS) > 0.9


def test_a_standby_takes_over() -> None:
    figures = measure_standby(kills=1, seed=1)
    assert isinstance(figures["standby_takeover_s"], float)
    assert figures["standby_takeover_s"] < 10.0


def test_the_crash_matrix_has_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what workers remember; without it, test_training.py has the same."""
    monkeypatch.setattr(crashes, "WORKERS", (2,))
    monkeypatch.delitem(crashes.SERIES, "crash_matrix")
    figures = crashes.measure_crashes(kills=2, seed=3, steps=40)
    matrix = figures["crash_matrix_topk"]
    assert isinstance(matrix, dict)
    assert (matrix["runs"], matrix["distinct_hashes"]) == (4, 1)
    assert figures["ledger"] == {"committed_twice": 0, "never_committed": 0}


async def test_the_ledgers_account_finds_what_is_wrong() -> None:
    async def indices_of(batch: int) -> Sequence[int]:
        return [(0, 1), (2, 3)][batch % 2]

    def entry(version: int, parent: int, batch: int) -> LedgerEntry:
        return LedgerEntry(version, parent, version, batch, (1, 1), SHARES)

    entries = [entry(1, 0, 0), entry(2, 1, 1), entry(3, 1, 1)]  # 2 was abandoned
    assert await account(entries, 3, 4, 2, indices_of) == {
        "ledger_steps": 2, "committed_twice": 0, "never_committed": 0, "owed": 0
    }  # fmt: skip
    entries = [entry(1, 0, 1), entry(2, 1, 1)]
    found = await account(entries, 2, 4, 2, indices_of)
    assert (found["committed_twice"], found["never_committed"]) == (2, 2)


async def test_the_ledgers_account_follows_what_is_late() -> None:
    async def indices_of(batch: int) -> Sequence[int]:
        return [(0, 1), (2, 3)][batch % 2]

    late, owed = LedgerEntry(1, 0, 1, 0, (1, 1), SHARES[:1], owed=(Owed(0, 1),)), (Owed(0, 1), Owed(1, 0))
    second = LedgerEntry(2, 1, 2, 1, (1, 1, 1), SHARES[1:], extra=(Owed(0, 1),), owed=owed)
    third = LedgerEntry(3, 2, 3, 2, (1, 1, 1, 1), (*SHARES, *MORE), extra=owed)
    found = await account([late, second], 2, 4, 2, indices_of)
    assert (found["committed_twice"], found["never_committed"], found["owed"]) == (0, 0, 2)
    found = await account([late, second, third], 3, 4, 2, indices_of)
    assert (found["committed_twice"], found["never_committed"], found["owed"]) == (0, 0, 0)
    forgotten = msgspec.structs.replace(third, shares=(*SHARES, *MORE[:1]))
    with pytest.raises(AssertionError, match="other shards than it should"):
        await account([late, second, forgotten], 3, 4, 2, indices_of)
    twice = msgspec.structs.replace(third, extra=(owed[0], owed[0]))
    found = await account([late, second, twice], 3, 4, 2, indices_of)
    assert (found["committed_twice"], found["never_committed"]) == (1, 1)


def test_parity_of_a_few_pairs() -> None:
    figures = measure_parity(seeds=2, steps=5, compressions=("int8",))
    parity = figures["parity"]
    assert isinstance(parity, dict)
    assert parity["int8"]["uplink_saved"] > 0.745


def test_the_interval_is_students() -> None:
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert (low, high) == pytest.approx((2.5 - 2.0542, 2.5 + 2.0542), abs=1e-3)


def test_a_run_over_a_slow_link_leaves_no_namespace() -> None:
    try:
        with namespaces.link("1gbit"):
            pass
    except namespaces.NoLink as error:
        pytest.skip(str(error))
    found = measure_link(("1gbit",), seeds=1, steps=10)["link"]
    assert isinstance(found, dict)
    sides = found["1gbit"]
    assert sides["ddp_fp32"]["seconds_to_loss"] > 0
    assert sides["ours"]["bytes_down"] > 8_000_000
    assert (
        "tmbench"
        not in subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    )


def test_buckets_that_are_held_back_still_arrive() -> None:
    figures = measure_overlap(repeats=1, steps=4, parameters=100_000)
    if figures["hidden_communication_share"] is None:
        pytest.skip(figures["hidden_communication"]["skipped"])
    assert figures["hidden_communication"]["step_after_s"] > 0
