"""Making schedules: written once, drawn from a plain seed or by hypothesis."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from hypothesis import strategies as st

from tests.schedules import steps as s
from tests.schedules import tasks

T = TypeVar("T")
MOST_STEPS = 24
NOISE = 1 << 16
POINTS = (0, 0, 0, 1, 2, 3, 5, 8, 13, 21)
PAUSES = (0.0, 0.0, 0.0, 0.01, 0.1, 0.3, 0.7, 1.3)
SPANS = (0.02, 0.3, 0.7, 1.1, 1.3, 2.6)
HOLDS = (0.02, 0.3, 1.3, 2.6, 6.0)
KINDS = (
    *("settle", "settle", "settle", "fetch", "fetch", "xreadgroup", "submit", "submit", "claim", "claim"),
    *("hand_back", "leave", "join", "promote", "cancel", "heartbeat", "look", "sweep", "xpending", "xrange"),
    *("xread", "xadd", "script", "client", "set", "getrange", "", "", ""),
)
EFFECTS = ("cut", "cut", "crash", "crash", "hold", "hold", "stall", "drain", "refuse", "refuse")


class Draw(Protocol):
    """Where choices come from."""

    def pick(self, options: Sequence[T]) -> T: ...

    def below(self, bound: int) -> int: ...

    def many(self, make: Callable[[Draw], T], least: int, most: int) -> list[T]: ...


class SeededDraw:
    """Choices of a plain seed."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def pick(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def below(self, bound: int) -> int:
        return int(self._random.random() * bound)

    def many(self, make: Callable[[Draw], T], least: int, most: int) -> list[T]:
        return [make(self) for _ in range(self._random.randint(least, most))]


class HypothesisDraw:
    """Choices of hypothesis, which makes them small again when a schedule fails."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def pick(self, options: Sequence[T]) -> T:
        return options[self._draw(st.integers(0, len(options) - 1))]

    def below(self, bound: int) -> int:
        number: int = self._draw(st.integers(0, bound - 1))
        return number

    def many(self, make: Callable[[Draw], T], least: int, most: int) -> list[T]:
        one = st.composite(lambda draw: make(HypothesisDraw(draw)))()
        made: list[T] = self._draw(st.lists(one, min_size=least, max_size=most))
        return made


@st.composite
def schedules(draw: Callable[[st.SearchStrategy[Any]], Any]) -> s.Schedule:
    """A strategy for hypothesis."""
    return schedule(HypothesisDraw(draw))


def seeded(seed: str) -> s.Schedule:
    """The schedule of a seed."""
    return schedule(SeededDraw(seed))


def schedule(draw: Draw) -> s.Schedule:
    setting = s.Setting(
        noise=draw.below(NOISE),
        ttl=draw.pick((1.0, 1.0, 0.5)),
        partitions=draw.pick((1, 1, 1, 2)),
        bound=draw.pick((None, None, None, 4)),
        when_full=draw.pick(("wait", "reject")),
    )
    first = s.Step(s.Start(draw.pick((1, 2, 4))))
    return s.Schedule(setting, (first, *draw.many(step, 3, MOST_STEPS)))


def step(draw: Draw) -> s.Step:
    action = draw.pick(_ACTIONS)(draw)
    return s.Step(action, draw.pick(POINTS), draw.pick(PAUSES))


def plan(draw: Draw) -> s.Plan:
    task = draw.pick(("plain", "plain", *tasks.KINDS))
    return s.Plan(
        task=task,
        lane=draw.pick((1, 0, 2)),
        delay=draw.pick((0.0, 0.0, 0.0, 0.0, 0.2, 0.9)),
        expires=draw.pick((0.0, 0.0, 0.0, 0.0, 0.15, 0.6)),
        failures=draw.pick((0, 0, 1, 2, 3) if task == "retried" else (0, 0, 0, 0, 0, 1)),
        keeps_result=draw.pick((True, True, True, False)),
        work=draw.pick(("quick", "quick", "gate", "sleep", "block")),
        seconds=draw.pick((0.01, 0.2, 0.6, 1.6)),
        large=draw.pick((False, False, False, False, True)),
    )


def _submit(draw: Draw) -> s.Action:
    return s.Submit(plan(draw), draw.below(2))


def _bulk(draw: Draw) -> s.Action:
    return s.Bulk(plan(draw), draw.pick((2, 3, 6)), draw.below(2))


def _trap(draw: Draw) -> s.Action:
    return s.SetTrap(
        kind=draw.pick(KINDS),
        when=draw.pick(("before", "after")),
        effect=draw.pick(EFFECTS),
        seconds=draw.pick(HOLDS),
        skip=draw.pick((0, 0, 0, 0, 1, 2)),
        process=draw.pick((-1, -1, -1, 0, 1, 2, 3)),
    )


_RARE: tuple[Callable[[Draw], s.Action], ...] = (
    lambda draw: s.CrashProducer(draw.below(2)),
    lambda draw: s.Restart(draw.pick(SPANS)),
    lambda draw: s.Pause(draw.pick(HOLDS)),
    lambda draw: s.Fill(draw.pick(SPANS)),
    lambda draw: s.Jump(draw.pick((0.4, 1.5, 5.0, -1.5))),
)
_ACTIONS: tuple[Callable[[Draw], s.Action], ...] = (
    *(_submit,) * 10,
    *(_bulk,) * 3,
    *(_trap,) * 8,
    *(lambda draw: s.Start(draw.pick((1, 2, 4)), draw.pick((0, 0, 0, 1))),) * 3,
    *(lambda draw: s.Cancel(draw.below(20)),) * 3,
    *(lambda draw: s.Finish(),) * 3,
    lambda draw: s.Drain(draw.below(4)),
    lambda draw: s.Drain(draw.below(4)),
    lambda draw: s.Crash(draw.below(4)),
    lambda draw: s.Crash(draw.below(4)),
    lambda draw: s.Stall(draw.below(4), draw.pick(SPANS)),
    lambda draw: s.Stall(draw.below(4), draw.pick(SPANS)),
    lambda draw: s.Block(draw.below(4), draw.pick(SPANS)),
    lambda draw: s.Cut(draw.below(6)),
    lambda draw: s.Cut(draw.below(6)),
    lambda draw: draw.pick(_RARE)(draw),
)
