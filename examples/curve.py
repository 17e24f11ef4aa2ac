"""A run's loss curve: a file of lines that grows while it trains, and outlives whatever the master does not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["loss", "validation", "rolled back", "stopped", "killed", "worker gone", "end"]


@dataclass(frozen=True, slots=True)
class Point:
    """One line of the file.

    Attributes:
        step: where the run stood.
        value: a loss; of "rolled back", "stopped", "killed" and "end" the step that the run goes on from.
    """

    kind: Kind
    step: int
    value: float


class Curve:
    """The points of a run, in the order in which they came.

    A step comes twice where the run went back and took it again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.points = _read(path)

    def add(self, kind: Kind, step: int, value: float = 0.0) -> None:
        """Write a point down at once."""
        point = Point(kind, step, value)
        self.points.append(point)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(point)) + "\n")

    def take_up(self, *, is_new: bool) -> None:
        """Go on with what the file has now, without a last line that a crash has cut short; or begin a new one."""
        self.points = [] if is_new else _read(self.path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text("".join(json.dumps(asdict(point)) + "\n" for point in self.points))

    def of(self, *kinds: Kind) -> list[Point]:
        return [point for point in self.points if point.kind in kinds]

    @property
    def step(self) -> int:
        """The last step that was taken; 0 before the first."""
        losses = self.of("loss")
        return losses[-1].step if losses else 0

    @property
    def validation(self) -> float | None:
        """The last validation loss."""
        measured = self.of("validation")
        return measured[-1].value if measured else None


def _read(path: Path) -> list[Point]:
    if not path.exists():
        return []
    points: list[Point] = []
    for line in path.read_text().splitlines():
        try:
            points.append(Point(**json.loads(line)))
        except (ValueError, TypeError):  # cut short by a crash
            continue
    return points
