"""The plain model: what was asked for, what was seen to happen, and the promises that this must keep.

It sees what the server was told and answered (the scripts' arguments and replies, in the server's own order), what
handlers did, and what producers heard. The numbers D1 to D10 are those of the promises.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from typing import Any

from taskmesh import Context
from taskmesh.broker.streams import Cancelled
from taskmesh.codec import decode_outcome
from taskmesh.keys import RETURNED, SUSPECTS
from taskmesh.messages import Outcome, Status
from tests.schedules import tasks
from tests.schedules.loop import Timeline
from tests.schedules.node import message_id
from tests.schedules.steps import Plan, Setting

NOBODY = (RETURNED, SUSPECTS)
WIDTHS = {
    "D": 2,
    "S": 5,
    "C": 5,
    "F": 6,
    "R": 4,
    "U": 3,
    "W": 6,
    "G": 4,
}  # of an entry in a settle's arguments


class Sent:
    """One message, from its submitter's side.

    Attributes:
        id: known as soon as the client has made it.
        heard: "accepted", "refused", "unknown", or "" while nothing was heard.
    """

    def __init__(self, number: int, plan: Plan, producer: str) -> None:
        self.number = number
        self.plan = plan
        self.producer = producer
        self.id = ""
        self.heard = ""
        self.handle: Any = None
        self.outcome: Outcome | None = None
        self.is_asked_for = False  # somebody wanted it cancelled
        self.never_starts = False  # ... and was told that it never will


class Run:
    """One run of a handler; ``state`` is "running", "returned", "raised" or "cancelled"."""

    def __init__(self, process: str, worker: str, attempt: int, began: float) -> None:
        self.process = process
        self.worker = worker
        self.attempt = attempt
        self.began = began
        self.state = "running"


class Model:
    """Gathers what happens; ``violation`` ends the schedule."""

    def __init__(self, timeline: Timeline, setting: Setting) -> None:
        self._timeline = timeline
        self._setting = setting
        self.violations: list[str] = []
        self.faults: list[str] = []
        self.messages: list[Sent] = []
        self.numbers: dict[str, int] = {}
        self.accepted: set[str] = set()
        self.runs: dict[str, list[Run]] = defaultdict(list)
        self.outcomes: dict[str, Outcome] = {}
        self.deaths: dict[str, set[bytes]] = defaultdict(set)  # who has died with a message
        self.renamed: set[str] = set()  # processes that found themselves struck off
        self.draining: set[str] = set()  # what they cannot settle in time, they give back
        self._names: dict[str, bytes] = {}
        self.robbed: set[tuple[str, str]] = set()
        self.last_heard: dict[tuple[bytes, bytes], float] = {}  # in each partition
        self._owners: dict[tuple[bytes, bytes], bytes] = {}  # of entries that were claimed, by lane and id
        self._perhaps_struck_off: set[bytes] = set()
        self._settled_by: dict[tuple[bytes, bytes], bytes] = {}
        self.gates: list[asyncio.Future[None]] = []
        self.seen: Counter[str] = Counter()

    def violation(self, text: str) -> None:
        self.violations.append(text)

    def require(self, holds: bool, text: str) -> None:
        if not holds:
            self.violation(text)

    def name(self, id: str) -> str:
        number = self.numbers.get(id)
        return f"message {id if number is None else number}"

    # producers

    def new(self, plan: Plan, producer: str) -> Sent:
        sent = Sent(len(self.messages), plan, producer)
        self.messages.append(sent)
        return sent

    def identified(self, sent: Sent, id: str) -> None:
        sent.id = id
        self.numbers[id] = sent.number

    def heard_of_cancel(self, sent: Sent, answer: Cancelled) -> None:
        if answer is Cancelled.ENDED:
            self.require(sent.id in self.outcomes, f"{self.name(sent.id)}: cancel says that it has ended")
        sent.never_starts |= answer is Cancelled.CANCELLED

    def ended_process(self, name: str) -> None:
        self.gates = [gate for gate in self.gates if gate.get_loop().process.name != name]  # type: ignore[attr-defined]

    # handlers

    def started(self, process: str, ctx: Context, n: int) -> Run:
        """D5: whoever starts what another has started must have been given it, or claimed it from a dead one."""
        id = ctx.task_id
        run = Run(process, ctx.worker, ctx.attempt, self._timeline.now)
        who = f"{self.name(id)} starts in {ctx.worker}"
        self.require(id in self.accepted, f"{who}: it was never accepted")
        self.require(not self.messages[n].never_starts, f"{who}: its cancellation said that it never would")
        is_late = (ctx.worker, id) in self.robbed  # and does not know it
        for before in self.runs[id]:
            if before.attempt == ctx.attempt and before.state != "cancelled" and before.worker != ctx.worker:
                self.require(
                    is_late or (before.worker, id) in self.robbed or before.process in self.draining,
                    f"D5: {who}, but {before.worker} has it ({before.state} since {before.began:.3f})",
                )
            self.require(
                before.worker != ctx.worker or before.attempt != ctx.attempt,
                f"D5: {who} for the second time",
            )
            self.require(
                is_late or before.attempt <= ctx.attempt,
                f"{who}: attempt {ctx.attempt} behind {before.attempt}",
            )
        self.runs[id].append(run)
        return run

    # what the server was told

    def saw_submit(self, process: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        if len(reply) == 1:  # none was accepted, or all of it before
            self.seen["resubmitted"] += reply[0] > 0
            return
        due_now = int(arguments[3])
        messages = [*arguments[4 : 4 + due_now], *arguments[5 + due_now :: 2]]
        for data in messages[: reply[0]]:
            id = message_id(data)
            self.require(id not in self.accepted, f"D2: {self.name(id)} is added twice")
            self.accepted.add(id)
        bound = int(arguments[1])
        self.require(not bound or sum(looks) <= bound, f"D7: {sum(looks)} messages in a bound of {bound}")

    def saw_heartbeat(self, process: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        if reply is not None:
            self.last_heard[keys[0], arguments[0]] = self._timeline.now

    def saw_join(self, process: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        self.last_heard[keys[3], arguments[1]] = self._timeline.now
        if self._names.setdefault(process, arguments[1]) != arguments[1]:
            self.renamed.add(process)

    def saw_leave(self, process: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        if reply:
            self.last_heard.pop((keys[3], arguments[1]), None)

    def saw_claim(self, process: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        """D5: nobody is robbed who was heard of within the TTL."""
        dead = arguments[1]
        self._perhaps_struck_off.add(dead)
        claimed = [message_id(row[1]) for lane in reply for row in lane]
        for lane, rows in zip(keys, reply, strict=False):
            self._owners.update({(lane, row[0]): arguments[3] for row in rows})
        if dead in NOBODY or not claimed:
            return
        self.seen["claimed"] += len(claimed)
        silent = self._timeline.now - self.last_heard.get((keys[3], dead), 0.0)
        self.require(
            silent >= self._setting.ttl - 0.0015,
            f"D5: {arguments[3].decode()} robs {dead.decode()}, which was heard of {silent:.3f} s before",
        )
        for id in claimed:
            self.deaths[id].add(dead)
            self.robbed.add((dead.decode(), id))

    def saw_settle(self, process: str, keys: Any, arguments: Any, reply: Any, looks: Any) -> None:
        """A failure counts only from the owner; a repeat of one's own settle is told from a lost claim."""
        if reply == [-1]:
            self.seen["settled again"] += 1
            return
        lane, worker, at = keys[0], arguments[1], 8
        for place in range(1, int(arguments[3]) + 1):
            entry, kind = (lane, arguments[at]), arguments[at + 1]
            at += WIDTHS[kind]
            if place in reply:
                self.seen["claim lost"] += 1
                own = self._settled_by.get(entry) == worker and worker not in self._perhaps_struck_off
                own = own and kind != "D" and process not in self.renamed
                self.require(
                    not own, f"{worker.decode()}'s own settle of {entry[1].decode()} reads as a lost claim"
                )
                continue
            self._settled_by[entry] = worker
            self.seen["unknown task"] += kind == "U"
            owner = self._owners.pop(entry, worker)
            self.require(
                kind in "SD" or owner == worker,
                f"D2: {worker.decode()} settles ({kind}) {entry[1].decode()}, which is {owner.decode()}'s",
            )

    def saw_pushes(self, fields: Any) -> None:
        """D2: what was pushed to a producer is an ending."""
        for id, data in zip(fields[::2], fields[1::2], strict=True):
            if id != b"opened":
                self._ended(id.decode(), decode_outcome(data))

    def _ended(self, id: str, outcome: Outcome) -> None:
        before = self.outcomes.get(id)
        if before is not None:
            self.violation(f"D2: {self.name(id)} is settled twice: {before.status}, then {outcome.status}")
            return
        self.outcomes[id] = outcome
        self.seen[outcome.status] += 1
        self.require(id in self.accepted, f"{self.name(id)} has an outcome and was never accepted")
        if id in self.numbers:
            trouble = self._contradicts(self.messages[self.numbers[id]], outcome)
            self.require(not trouble, f"{self.name(id)} is {outcome.status}: {trouble}")

    def _contradicts(self, sent: Sent, outcome: Outcome) -> str:
        """Why a message cannot have this outcome; empty when it can."""
        runs, plan = self.runs[sent.id], sent.plan
        if outcome.status is Status.SUCCEEDED:
            values = {f"{sent.number}/{run.attempt}" for run in runs if run.state == "returned"}
            return "" if outcome.value in values else f"no run of it returned {outcome.value!r}"
        if outcome.status is Status.CANCELLED:
            return "" if sent.is_asked_for else "nobody asked for that"
        if outcome.status is Status.EXPIRED:
            # A drain gives back what it has cut off, or could not settle, uncounted; parking forgets the count too.
            has_run = not self.seen["unknown task"] and any(
                run.state != "cancelled" and run.process not in self.draining for run in runs
            )
            return "" if plan.expires and not has_run else "it may not expire"
        assert outcome.failure is not None
        if outcome.failure.type == "ValueError":
            last = tasks.attempts_of(plan.task)
            ended = any(run.state == "raised" and run.attempt == last for run in runs)
            return "" if ended else "its last attempt has not failed"
        if outcome.failure.type == "TimeoutError":
            return (
                "" if plan.task == "timed" and any(run.state == "cancelled" for run in runs) else "no timeout"
            )
        if "workers died" in outcome.failure.message:
            enough = len(self.deaths[sent.id]) >= tasks.deaths_of(plan.task)
            return "" if enough else f"{len(self.deaths[sent.id])} workers died with it"
        return str(outcome.failure)

    # the end

    def close(self, left: Counter[str], dead: Counter[str]) -> None:
        """D1: everything accepted has ended, once, and everybody who waited for it has heard of it.

        Args:
            left: ids of messages that still lie in the queue.
            dead: ids of dead letters.
        """
        for id in left:
            self.violation(f"D1: {self.name(id)} is left in the queue")
        for sent in self.messages:
            if sent.heard == "accepted":
                self.require(sent.id in self.accepted, f"message {sent.number}: accepted, says the client")
            if sent.id in self.accepted:
                self._close(sent, dead[sent.id])
        strays = [id for id in dead if id not in self.accepted]
        self.require(not strays, f"dead letters of messages that were never accepted: {strays}")

    def _close(self, sent: Sent, letters: int) -> None:
        outcome = self.outcomes.get(sent.id)
        name = f"message {sent.number}"
        self.require(sent.heard != "refused", f"{name} was refused, says the client, and was accepted")
        if sent.plan.keeps_result:
            self.require(outcome is not None, f"D1: {name} was accepted and has no outcome: lost")
        elif outcome is None:
            # Nobody is told of its ending where its producer has no reply stream.
            may_be_dropped = sent.is_asked_for or sent.plan.expires
            ran = any(run.state == "returned" for run in self.runs[sent.id])
            self.require(
                ran or letters == 1 or bool(may_be_dropped),
                f"D1: {name} was accepted and never ran to its end: lost",
            )
        failed = outcome is not None and outcome.status is Status.FAILED
        self.require(letters <= 1, f"D2: {name} is dead-lettered {letters} times")
        if outcome is not None:
            self.require(
                failed == (letters == 1), f"{name} is {outcome.status} and has {letters} dead letters"
            )
        if sent.never_starts:
            cancelled = outcome is None or outcome.status is Status.CANCELLED
            self.require(cancelled, f"{name}: its cancellation said that it was cancelled")
        if sent.outcome is not None and outcome is not None:
            self.require(
                sent.outcome.status == outcome.status, f"{name}: its handle says {sent.outcome.status}"
            )
