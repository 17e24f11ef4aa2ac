"""The account of a run: every message, from what the processes noted and what the servers did. Pure.

A message is *acknowledged* when its submit returned. One whose submit was cut off or given up may be in or not; if it
is in, it is counted like the others. It ends once, on the history that survived.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import quantiles

from benchmarks.chaos.history import Histories, History, Settle
from benchmarks.chaos.ledger import Event

SUBMITTED = ("accepted", "refused", "unknown")
ENDS = ("succeeded", "failed", "cancelled", "expired")
WITHOUT_RESULTS = ("silent",)  # tasks that keep none


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that must not be. ``kind`` is ``lost``, ``settled_twice``, or what else was promised and broken."""

    kind: str
    id: str
    key: str
    text: str


@dataclass(slots=True)
class Account:
    """The counts of a run, and what is wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    recoveries: list[float] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    @property
    def recovery(self) -> tuple[float | None, float | None]:
        """Median and 99th percentile in seconds; None where nothing had to recover."""
        times = sorted(self.recoveries)
        if len(times) < 2:
            return (times[0], times[0]) if times else (None, None)
        cuts = quantiles(times, n=100, method="inclusive")
        return cuts[49], cuts[98]


@dataclass(slots=True)
class _Books:
    """The ledger, sorted."""

    state: dict[str, str] = field(
        default_factory=dict
    )  # key -> accepted, refused, unknown; or intent, cut off
    ids: dict[str, str] = field(default_factory=dict)  # key -> id, of what was acknowledged
    keys: dict[str, str] = field(default_factory=dict)  # id -> key
    starts: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    outcomes: dict[str, list[Event]] = field(default_factory=lambda: defaultdict(list))
    awaited: set[str] = field(default_factory=set)
    dead: set[str] = field(default_factory=set)
    cancelled: dict[str, Event] = field(default_factory=dict)
    tasks: dict[str, str] = field(default_factory=dict)  # by key
    succeeded: set[str] = field(default_factory=set)  # runs
    finished: set[str] = field(default_factory=set)  # messages of those runs
    to_cancel: set[str] = field(default_factory=set)
    repeats: int = 0


def _read(events: Sequence[Event]) -> _Books:
    books = _Books()
    for event in events:
        if event.what == "intent":
            books.state[event.key] = "intent"
            books.tasks[event.key] = event.task
        elif event.what in SUBMITTED:
            books.state[event.key] = event.what
            if event.id:
                books.ids[event.key] = event.id
        elif event.what == "start":
            books.starts[event.id].append(event)
        elif event.what == "finish" and event.text == "succeeded":
            books.succeeded.add(event.run)
            books.finished.add(event.id)
        elif event.what == "outcome":
            books.outcomes[event.id].append(event)
        elif event.what == "dead":
            books.dead.add(event.id)
        elif event.what == "awaited":
            books.awaited.add(event.id)
        elif event.what == "cancel":
            books.to_cancel.add(event.id)
            if event.text == "cancelled":
                books.cancelled[event.id] = event
        elif event.what == "repeats":
            books.repeats += int(event.text)
        if event.id and event.key:
            books.keys[event.id] = event.key
    return books


def take_account(events: Sequence[Event], histories: Histories, primary_loss: bool = False) -> Account:
    """Account for every message of a run that has been drained.

    Args:
        events: the ledgers of all processes, by time.
        primary_loss: what is on no surviving history may have been undone by a failover, if it was on another.
    """
    account = Account()
    books = _read(events)
    surviving, undone = histories
    present = set(surviving.steps)
    acknowledged = set(books.ids.values())
    names = {**surviving.keys, **books.keys}
    for message_id in sorted(acknowledged | present):
        key = names.get(message_id, "")
        kind = _fate(message_id, key, histories, primary_loss, account)
        if kind in ENDS and not _is_vouched_for(message_id, key, surviving.settles[message_id][0], books):
            account.problems.append(Problem("lost", message_id, key, "it was removed without an outcome"))
            kind = "lost"
        account.counts["accepted"] += 1
        account.counts["acknowledged" if message_id in acknowledged else "unacknowledged"] += 1
        account.counts[kind] += 1
    if primary_loss:
        again = [len(settles) for message_id, settles in undone.settles.items() if message_id in present]
        account.counts["undone_settles"] = sum(again)
        account.counts["undone_by_failover"] = sum(again) + account.counts["undone_submits"]
    account.counts["duplicate_starts"] = _duplicate_starts(books)
    _check_submissions(books, surviving.keys, account)
    _check_outcomes(books, histories, primary_loss, account)
    _check_dead_letters(books, surviving, account)
    if books.repeats and not primary_loss:
        account.problems.append(
            Problem("settled_twice", "", "", f"{books.repeats} outcomes were pushed to a client once more")
        )
    account.counts["settled_twice"] = sum(problem.kind == "settled_twice" for problem in account.problems)
    account.recoveries = recoveries(events)
    return account


def _fate(message_id: str, key: str, histories: Histories, primary_loss: bool, account: Account) -> str:
    """What became of one message; the worst is noted as a problem."""
    surviving, undone = histories
    settles = surviving.settles.get(message_id, [])
    if not settles:
        if primary_loss and message_id not in surviving.steps and message_id in undone.steps:
            return "undone_submits"
        where = surviving.where.get(message_id, "nowhere")
        account.problems.append(Problem("lost", message_id, key, f"it has not ended; it is {where}"))
        return "lost"
    if len(settles) > 1:
        text = "; ".join(map(str, settles))
        account.problems.append(Problem("settled_twice", message_id, key, f"{len(settles)} endings: {text}"))
    if any(settle.reason for settle in settles):
        account.counts["dead_lettered"] += 1
    return _counted_as(settles[0])


def _counted_as(settle: Settle) -> str:
    if settle.status != "done":
        return settle.status
    if settle.reason:
        return "failed"
    return "succeeded" if settle.entry else "cancelled"


def _is_vouched_for(message_id: str, key: str, settle: Settle, books: _Books) -> bool:
    """An ending without a record is one for a task that keeps none, and for a reason that the ledger knows."""
    if settle.status != "done" or settle.reason:
        return True
    if books.tasks.get(key) not in WITHOUT_RESULTS:
        return False
    return message_id in books.finished or message_id in books.to_cancel


def _duplicate_starts(books: _Books) -> int:
    runs = Counter((event.id, event.attempt) for events in books.starts.values() for event in events)
    return sum(count - 1 for count in runs.values())


def _check_submissions(books: _Books, keys: dict[str, str], account: Account) -> None:
    """Nothing that was refused is in, and nothing is in twice."""
    ids: dict[str, set[str]] = defaultdict(set)
    for message_id, key in {**keys, **{i: k for k, i in books.ids.items()}}.items():
        ids[key].add(message_id)
    for key, found in ids.items():
        if books.state.get(key) == "refused":
            account.problems.append(Problem("refused_but_in", min(found), key, "its submit was refused"))
        if len(found) > 1:
            text = f"in under several ids: {sorted(found)}"
            account.problems.append(Problem("published_twice", min(found), key, text))


def _check_outcomes(books: _Books, histories: Histories, primary_loss: bool, account: Account) -> None:
    """What handles told is what the servers did; what was cancelled before its start never started."""
    for message_id, events in books.outcomes.items():
        made = histories.surviving.settles.get(message_id, []) + histories.undone.settles.get(message_id, [])
        for event in events:
            if not any(_agree(event, settle) for settle in made):
                text = f"its handle told {event.text} by run {event.run!r}, which is not what was settled: {made}"
                account.problems.append(Problem("settled_twice", message_id, event.key, text))
    for message_id, settles in histories.surviving.settles.items():
        for settle in settles:
            if settle.run and settle.run not in books.succeeded:
                text = f"run {settle.run} is said to have succeeded, and never did"
                account.problems.append(Problem("invented", message_id, books.keys.get(message_id, ""), text))
    for message_id in books.awaited & set(histories.surviving.settles):
        key = books.keys.get(message_id, "")
        account.problems.append(
            Problem("never_told", message_id, key, "whoever awaited it was not told its end")
        )
    if primary_loss:
        return
    for message_id, event in books.cancelled.items():
        late = [start for start in books.starts.get(message_id, ()) if start.at > event.at]
        if late:
            text = f"it started {late[0].at - event.at:.3f} s after its cancellation had been confirmed"
            account.problems.append(Problem("started_after_cancel", message_id, event.key, text))


def _check_dead_letters(books: _Books, surviving: History, account: Account) -> None:
    """The dead letters that the server shows are those that it was seen to make."""
    made = {i for i, settles in surviving.settles.items() if any(settle.reason for settle in settles)}
    for message_id in made ^ books.dead:
        text = "is gone" if message_id in made else "was never made"
        key = books.keys.get(message_id, "")
        account.problems.append(Problem("dead_letters", message_id, key, f"its dead letter {text}"))


def _agree(event: Event, settle: Settle) -> bool:
    return event.text == settle.status and (not event.run or not settle.run or event.run == settle.run)


def recoveries(events: Sequence[Event]) -> list[float]:
    """Seconds from the kill of a worker to the restart elsewhere of each task that it was running.

    A task that ended without a restart (it was cancelled meanwhile, or settled just before) is left out.
    """
    running: dict[int, dict[str, str]] = defaultdict(dict)  # pid -> run -> id
    waiting: dict[str, float] = {}  # id -> when its worker was killed
    times = []
    for event in events:
        if event.what == "start":
            running[event.pid][event.run] = event.id
            killed_at = waiting.pop(event.id, None)
            if killed_at is not None:
                times.append(event.at - killed_at)
        elif event.what == "finish":
            running[event.pid].pop(event.run, None)
        elif event.what == "fault" and event.task == "worker_kill":
            for message_id in running.pop(int(event.text), {}).values():
                waiting[message_id] = event.at
    return times


def tell(problem: Problem, events: Sequence[Event], histories: Histories) -> str:
    """A problem with the whole history of its message, in lines."""
    begin = events[0].at if events else 0.0
    lines = [f"{problem.kind}: message {problem.id or '?'} (key {problem.key or '?'}): {problem.text}"]
    lines += [
        f"  {event.at - begin:8.3f} s  pid {event.pid}  {event.what} {event.task} {event.run} {event.text}"
        f" attempt {event.attempt} deliveries {event.deliveries}"
        for event in events
        if (problem.id and event.id == problem.id) or (problem.key and event.key == problem.key)
    ]
    for name, history in (("surviving", histories.surviving), ("undone", histories.undone)):
        lines += [f"  server ({name}): {step}" for step in history.steps.get(problem.id, ())]
    return "\n".join(lines)
