"""What a schedule consists of. Everything is plain data: its ``repr`` is Python that makes it again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Setting:
    """What does not change in the course of a schedule.

    Attributes:
        noise: seeds the latencies and who goes first; 0 for none.
        ttl: the liveness TTL; the other durations are virtual seconds as well.
        bound: messages that the queue holds at most.
    """

    noise: int = 0
    ttl: float = 1.0
    partitions: int = 1
    bound: int | None = None
    when_full: Literal["wait", "reject"] = "wait"


@dataclass(frozen=True)
class Plan:
    """One message and what becomes of it.

    Attributes:
        task: one of ``tasks.KINDS``.
        failures: so many attempts raise.
        work: "quick" never suspends, "sleep" waits for ``seconds``, "gate" for a Finish, "block" holds the loop.
        large: its arguments travel as a blob.
    """

    task: str = "plain"
    lane: int = 1
    delay: float = 0.0
    expires: float = 0.0
    failures: int = 0
    keeps_result: bool = True
    work: str = "quick"
    seconds: float = 0.0
    large: bool = False


@dataclass(frozen=True)
class Submit:
    plan: Plan
    producer: int = 0


@dataclass(frozen=True)
class Bulk:
    plan: Plan
    count: int = 3
    producer: int = 0


@dataclass(frozen=True)
class Cancel:
    message: int = 0


@dataclass(frozen=True)
class Finish:
    """Open the gates of all messages that are at one now."""


@dataclass(frozen=True)
class Start:
    """A worker; ``knows`` 0 is all tasks, 1 is all but the retried ones."""

    concurrency: int = 2
    knows: int = 0


@dataclass(frozen=True)
class Drain:
    worker: int = 0


@dataclass(frozen=True)
class Crash:
    worker: int = 0


@dataclass(frozen=True)
class CrashProducer:
    producer: int = 0


@dataclass(frozen=True)
class Stall:
    worker: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Block:
    worker: int = 0
    seconds: float = 1.0


@dataclass(frozen=True)
class Cut:
    """All connections of a process."""

    process: int = 0


@dataclass(frozen=True)
class Restart:
    seconds: float = 0.1


@dataclass(frozen=True)
class Pause:
    seconds: float = 0.1


@dataclass(frozen=True)
class Fill:
    seconds: float = 0.5


@dataclass(frozen=True)
class Jump:
    """The server's clock is set, forward or back."""

    seconds: float = 5.0


@dataclass(frozen=True)
class SetTrap:
    """At the next command of that kind (see ``World.kind_of``; "" for any) something happens.

    Attributes:
        when: "before" the command reaches the server, or "after" it has been run and before its reply is read.
        effect: "cut", "crash", "hold", "stall", "drain"; "refuse" has the server answer with an error.
        skip: so many of that kind pass first.
    """

    kind: str = ""
    when: str = "before"
    effect: str = "cut"
    seconds: float = 0.0
    skip: int = 0
    process: int = -1


Action = (
    Submit
    | Bulk
    | Cancel
    | Finish
    | Start
    | Drain
    | Crash
    | CrashProducer
    | Stall
    | Block
    | Cut
    | Restart
    | Pause
    | Fill
    | Jump
    | SetTrap
)


@dataclass(frozen=True)
class Step:
    """An action, so many points and so many seconds after the one before."""

    action: Action
    points: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Schedule:
    setting: Setting = Setting()
    steps: tuple[Step, ...] = ()


class Trap:
    """A trap that has been set; ``process`` is a name, "" for anybody's."""

    def __init__(self, step: SetTrap, process: str) -> None:
        self.kind = step.kind
        self.when = step.when
        self.effect = step.effect
        self.seconds = step.seconds
        self._left = step.skip
        self._process = process

    def springs(self, process: str, kind: str, when: str) -> bool:
        if (
            when != self.when
            or (self.kind and kind != self.kind)
            or (self._process and process != self._process)
        ):
            return False
        self._left -= 1
        return self._left < 0
