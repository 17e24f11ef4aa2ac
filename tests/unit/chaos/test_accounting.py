"""The account of the chaos run counts what made-up ledgers and histories contain: losses and second endings too."""

from __future__ import annotations

from typing import Any

from benchmarks.chaos.accounting import Account, recoveries, take_account, tell
from benchmarks.chaos.history import Histories, History, Settle
from benchmarks.chaos.ledger import Event


def event(at: float, what: str, **more: Any) -> Event:
    return Event(at=at, what=what, **more)


def submitted(key: str, message_id: str, task: str = "nap") -> list[Event]:
    return [event(0.0, "intent", key=key, task=task), event(0.0, "accepted", key=key, id=message_id)]


def ran(message_id: str, run: str, at: float = 1.0, pid: int = 7, **more: Any) -> list[Event]:
    return [
        event(at, "start", id=message_id, run=run, pid=pid, attempt=1, **more),
        event(at, "finish", id=message_id, run=run, pid=pid, text="succeeded"),
    ]


def history(settles: dict[str, list[Settle]], waiting: tuple[str, ...] = (), **keys: str) -> History:
    made = History(keys={message_id: key for key, message_id in keys.items()})
    for message_id in (*settles, *waiting):
        made.steps[message_id].append("added")
        made.where[message_id] = "ended" if message_id in settles else "stream"
    made.settles.update(settles)
    return made


def account_of(
    events: list[Event],
    surviving: History,
    undone: History | None = None,
    *,
    primary_loss: bool = False,
) -> Account:
    return take_account(events, Histories(surviving, undone or History()), primary_loss)


def kinds(account: Account) -> list[str]:
    return [problem.kind for problem in account.problems]


def test_all_is_well() -> None:
    events = [
        *submitted("a", "1"),
        *submitted("b", "2"),
        *submitted("c", "3"),
        *submitted("d", "4"),
        *ran("1", "7.1"),
        event(2.0, "outcome", id="1", run="7.1", text="succeeded"),
        event(9.0, "dead", id="2"),
    ]
    surviving = history(
        {
            "1": [Settle("succeeded", "7.1", "5-0")],
            "2": [Settle("failed", "", "5-1", "failed: attempt 1 of 1")],
            "3": [Settle("cancelled")],
            "4": [Settle("expired", "", "5-2")],
        }
    )
    account = account_of(events, surviving)
    assert account.problems == []
    counted = {"accepted": 4, "succeeded": 1, "failed": 1, "cancelled": 1, "expired": 1, "dead_lettered": 1}
    assert {name: account.counts[name] for name in counted} == counted
    assert account.counts["lost"] == account.counts["settled_twice"] == 0


def test_an_accepted_message_that_no_server_knows_is_lost() -> None:
    account = account_of(submitted("a", "1"), history({}))
    assert kinds(account) == ["lost"]
    assert account.counts["lost"] == 1
    assert "nowhere" in account.problems[0].text


def test_an_accepted_message_that_never_ends_is_lost() -> None:
    account = account_of(submitted("a", "1"), history({}, waiting=("1",)))
    assert kinds(account) == ["lost"]
    assert "stream" in account.problems[0].text


def test_two_endings_are_counted() -> None:
    twice = [Settle("succeeded", "7.1", "5-0"), Settle("succeeded", "8.1", "5-1")]
    events = [*submitted("a", "1"), *ran("1", "7.1"), *ran("1", "8.1", 2.0, pid=8)]
    account = account_of(events, history({"1": twice}))
    assert kinds(account) == ["settled_twice"]
    assert account.counts["settled_twice"] == 1
    assert account.counts["duplicate_starts"] == 1
    assert account.counts["succeeded"] == 1


def test_a_success_that_is_also_a_dead_letter_is_counted() -> None:
    twice = [Settle("succeeded", "7.1", "5-0"), Settle("failed", "", "5-0", "worker died")]
    events = [*submitted("a", "1"), *ran("1", "7.1"), event(9.0, "dead", id="1")]
    account = account_of(events, history({"1": twice}))
    assert kinds(account) == ["settled_twice"]


def test_an_outcome_that_a_handle_told_and_the_server_does_not_have_is_counted() -> None:
    events = [
        *submitted("a", "1"),
        *ran("1", "7.1"),
        *ran("1", "8.1", 3.0, pid=8),
        event(2.0, "outcome", id="1", run="7.1", text="succeeded"),
    ]
    account = account_of(events, history({"1": [Settle("succeeded", "8.1", "5-0")]}))
    assert kinds(account) == ["settled_twice"]


def test_a_submit_that_was_given_up_may_be_in_or_not() -> None:
    events = [event(0.0, "intent", key=key) for key in "abc"] + [event(1.0, "unknown", key="b")]
    surviving = history({"1": [Settle("expired", "", "5-0")]}, a="1")
    account = account_of(events, surviving)
    assert account.problems == []
    assert account.counts["unacknowledged"] == account.counts["accepted"] == account.counts["expired"] == 1


def test_but_it_ends_once_like_the_others() -> None:
    twice = [Settle("expired", "", "5-0"), Settle("expired", "", "5-1")]
    account = account_of([event(0.0, "intent", key="a")], history({"1": twice}, a="1"))
    assert kinds(account) == ["settled_twice"]


def test_what_was_refused_is_not_in() -> None:
    events = [event(0.0, "intent", key="a"), event(1.0, "refused", key="a")]
    account = account_of(events, history({"1": [Settle("expired", "", "5-0")]}, a="1"))
    assert kinds(account) == ["refused_but_in"]


def test_one_submit_is_in_once() -> None:
    surviving = history({"1": [Settle("expired", "", "5-0")], "2": [Settle("expired", "", "5-1")]})
    surviving.keys.update({"1": "a", "2": "a"})
    assert kinds(account_of(submitted("a", "1"), surviving)) == ["published_twice"]


def test_what_was_cancelled_before_its_start_never_starts() -> None:
    events = [*submitted("a", "1"), event(1.0, "cancel", id="1", text="cancelled"), *ran("1", "7.1", 2.0)]
    account = account_of(events, history({"1": [Settle("cancelled")]}))
    assert kinds(account) == ["started_after_cancel"]


def test_a_success_has_a_run_that_succeeded() -> None:
    account = account_of(submitted("a", "1"), history({"1": [Settle("succeeded", "7.1", "5-0")]}))
    assert kinds(account) == ["invented"]


def test_whoever_awaits_an_outcome_is_told() -> None:
    events = [*submitted("a", "1"), *submitted("b", "2"), event(9.0, "awaited", id="1")]
    account = account_of(events, history({"1": [Settle("expired")], "2": [Settle("expired")]}))
    assert kinds(account) == ["never_told"]


def test_dead_letters_are_those_that_were_made() -> None:
    gone = history({"1": [Settle("failed", "", "5-0", "worker died")]})
    assert kinds(account_of(submitted("a", "1"), gone)) == ["dead_letters"]
    events = [*submitted("a", "1"), event(9.0, "dead", id="1")]
    assert kinds(account_of(events, history({"1": [Settle("expired")]}))) == ["dead_letters"]


def test_without_primary_loss_nothing_is_excused_by_another_nodes_history() -> None:
    account = account_of(submitted("a", "1"), history({}), history({}, waiting=("1",)))
    assert kinds(account) == ["lost"]


def test_what_is_removed_without_an_outcome_is_lost_unless_its_task_keeps_none_and_it_ran() -> None:
    removed = {"1": [Settle("done", "", "5-0")]}
    assert kinds(account_of([*submitted("a", "1"), *ran("1", "7.1")], history(removed))) == ["lost"]
    assert kinds(account_of(submitted("a", "1", "silent"), history(removed))) == ["lost"]
    account = account_of([*submitted("a", "1", "silent"), *ran("1", "7.1")], history(removed))
    assert account.problems == []
    assert account.counts["succeeded"] == 1


def test_a_task_without_results_may_be_cancelled_before_its_start() -> None:
    events = [*submitted("a", "1", "silent"), event(1.0, "cancel", id="1", text="asked")]
    account = account_of(events, history({"1": [Settle("done")]}))
    assert account.problems == []
    assert account.counts["cancelled"] == 1


# Primary loss


def test_a_submit_that_only_the_lost_primary_had_is_undone_and_not_lost() -> None:
    undone = history({}, waiting=("1",))
    account = account_of(submitted("a", "1"), history({}), undone, primary_loss=True)
    assert account.problems == []
    assert account.counts["undone_submits"] == account.counts["undone_by_failover"] == 1
    assert account.counts["lost"] == 0


def test_a_submit_that_nobody_had_is_lost_all_the_same() -> None:
    account = account_of(submitted("a", "1"), history({}), history({}), primary_loss=True)
    assert account.counts["lost"] == 1
    assert account.counts["undone_by_failover"] == 0


def test_a_settle_that_only_the_lost_primary_had_is_undone_and_the_next_one_is_no_second() -> None:
    events = [
        *submitted("a", "1"),
        *ran("1", "7.1"),
        event(2.0, "outcome", id="1", run="7.1", text="succeeded"),
        *ran("1", "8.1", 3.0, pid=8),
    ]
    surviving = history({"1": [Settle("succeeded", "8.1", "5-0")]})
    undone = history({"1": [Settle("succeeded", "7.1", "5-0")]})
    account = account_of(events, surviving, undone, primary_loss=True)
    assert account.problems == []
    assert account.counts["undone_settles"] == account.counts["undone_by_failover"] == 1


def test_two_endings_on_the_surviving_history_are_two_after_a_failover_too() -> None:
    twice = [Settle("expired", "", "5-0"), Settle("expired", "", "5-1")]
    account = account_of(submitted("a", "1"), history({"1": twice}), History(), primary_loss=True)
    assert kinds(account) == ["settled_twice"]


# Recovery


def test_recovery_is_from_the_kill_to_the_restart_of_what_was_running() -> None:
    events = [
        event(1.0, "start", id="1", run="7.1", pid=7),
        event(1.1, "start", id="2", run="7.2", pid=7),
        event(1.2, "finish", id="2", run="7.2", pid=7, text="succeeded"),
        event(1.5, "start", id="3", run="8.1", pid=8),
        event(2.0, "fault", task="worker_kill", text="7"),
        event(2.5, "start", id="2", run="8.2", pid=8),
        event(3.25, "start", id="1", run="8.3", pid=8),
    ]
    assert recoveries(events) == [1.25]


def test_median_and_tail_of_recovery() -> None:
    assert Account().recovery == (None, None)
    assert Account(recoveries=[1.0]).recovery == (1.0, 1.0)
    median, tail = Account(recoveries=[float(n) for n in range(101)]).recovery
    assert median == 50.0
    assert tail == 99.0


def test_a_problem_is_told_with_the_whole_history_of_its_message() -> None:
    events = [*submitted("a", "1"), *submitted("b", "2"), *ran("1", "7.1")]
    histories = Histories(history({}, waiting=("1",)), History())
    [problem] = take_account(events[:2] + events[4:], histories).problems
    told = tell(problem, events, histories)
    assert "lost" in told
    assert "7.1" in told
    assert "server (surviving): added" in told
    assert "key b" not in told
