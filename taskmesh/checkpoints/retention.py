"""Which versions are kept: a pure rule over manifests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from taskmesh.checkpoints.manifest import Manifest, Part
from taskmesh.errors import ConfigurationError

DEFAULT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Every:
    """When a version becomes a checkpoint, how long checkpoints are kept, and where else they go.

    Attributes:
        steps: every so many steps; 50 where neither this nor ``seconds`` is given.
        seconds: at the first step that ends so many seconds after the last checkpoint was due, by the master's
            monotonic clock. What is computed does not depend on it.
        keep: the newest so many are kept; versions that rollbacks made current again are not counted twice.
        milestone_steps: checkpoints at multiples of this are kept for good.
        best: the name of a metric; the checkpoint that is best by it is kept too.
        best_is: whether the lowest or the highest value is best.
        mirror: a folder that fsspec knows ("file:///backup", "s3://bucket/runs"); each checkpoint is written there
            too, under the names of Mesh and run, and kept as long. A run of which Redis knows nothing goes on from
            there. Needs the extra "mirror".
    """

    steps: int | None = None
    keep: int = 5
    milestone_steps: int | None = None
    best: str | None = None
    best_is: Literal["lowest", "highest"] = "lowest"
    seconds: float | None = None
    mirror: str | None = None

    def __post_init__(self) -> None:
        if (self.steps is not None and self.steps < 1) or self.keep < 1:
            raise ConfigurationError(f"{self}: steps and keep from 1")
        if self.milestone_steps is not None and self.milestone_steps < 1:
            raise ConfigurationError(f"{self}: milestone_steps from 1")
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigurationError(f"{self}: seconds above 0")

    def is_due(self, step: int, elapsed: float = 0.0) -> bool:
        """Whether the version of this step is kept, so many seconds after the last that was due."""
        if self._is_milestone(step) or (self.seconds is not None and elapsed >= self.seconds):
            return True
        steps = DEFAULT_STEPS if self.steps is None and self.seconds is None else self.steps
        return steps is not None and step % steps == 0

    def _is_milestone(self, step: int) -> bool:
        return self.milestone_steps is not None and step > 0 and step % self.milestone_steps == 0

    def _newest(self, newest_first: Sequence[Manifest]) -> set[int]:
        """The newest ``keep`` states; versions that share one's chunks, as rollbacks make them, count as one."""
        stay: set[int] = set()
        states: set[Part] = set()
        for manifest in newest_first:
            states.add(manifest.parts["parameters"])
            if len(states) > self.keep:
                break
            stay.add(manifest.version)
        return stay

    def retained(self, manifests: Sequence[Manifest]) -> set[int]:
        """The versions, of those given, that stay."""
        newest_first = sorted(manifests, key=lambda manifest: manifest.version, reverse=True)
        stay = self._newest(newest_first)
        stay |= {manifest.version for manifest in newest_first if self._is_milestone(manifest.step)}
        if self.best is not None:
            rated = [(m.metrics[self.best], m.version) for m in newest_first if self.best in m.metrics]
            sign = 1 if self.best_is == "lowest" else -1
            # Of equals the newer one.
            stay |= {
                version for _, version in sorted(rated, key=lambda rating: (sign * rating[0], -rating[1]))[:1]
            }
        return stay
