"""How a run is set up: what its master and its workers go by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from taskmesh.checkpoints.retention import Every
from taskmesh.errors import ConfigurationError
from taskmesh.keys import RunKeys
from taskmesh.training.compression.base import Compression
from taskmesh.training.modes import Asynchronous, LocalSteps, Mode, Synchronous
from taskmesh.training.robust import Aggregation
from taskmesh.training.rollback import OnDivergence

Reduce = Literal["auto", "master", "workers"]


@dataclass(frozen=True, slots=True)
class RunSetup:
    """A run's settings.

    Attributes:
        shards: logical shards of each step; fixed, however many workers there are.
        batch_size: samples of each step.
        samples: length of the data.
        lease_ttl: seconds after which a master that is not heard of may be replaced.
        fingerprint: what this process's bits depend on; "" where the run may have any.
        execution: how shards are computed, in words.
        aggregation: how the gradients of a step's shards become one.
        downlink: by what gradients are compressed on their way to the workers, who step by them as the master does;
            None where the parameters themselves travel.
        clip: the largest norm of a step's mean gradient; None for any.
        data: what tells the data from others of their length (``taskmesh.training.identity``); "" for nothing.
        reduce: who adds the gradients of a step's shards up: the master; workers, range by range; or whoever is
            sooner done with it. The bits are the same.
    """

    keys: RunKeys
    seed: int
    shards: int
    batch_size: int
    compression: Compression
    checkpoint: Every
    divergence: OnDivergence
    samples: int
    lease_ttl: float
    mode: Mode
    fingerprint: str
    execution: str
    aggregation: Aggregation
    downlink: Compression | None
    clip: float | None = None
    data: str = ""
    reduce: Reduce = "auto"

    def __post_init__(self) -> None:
        if self.shards < 1:
            raise ConfigurationError(f"shards is {self.shards}; it must be at least 1")
        if self.reduce not in get_args(Reduce):
            raise ConfigurationError(f"reduce is {self.reduce!r}; it is 'auto', 'master' or 'workers'")
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip is {self.clip}; it must be above 0")

    @property
    def agreement(self) -> str:
        """What master and workers must have alike beside the model's layout, for the same bits, in words."""
        parts = (
            f"seed {self.seed}",
            f"{self.samples} samples",
            f"compression {self.compression.name}",
            f"downlink {self.downlink_name}",
            self.mode_name,
            self.execution,
            f"aggregation {self.aggregation.name}",
            f"clip {self.clip_name}",
        )
        return ", ".join(parts)

    @property
    def clip_name(self) -> str:
        """To which norm gradients are clipped, in words."""
        return "none" if self.clip in (None, math.inf) else str(self.clip)

    @property
    def mode_name(self) -> str:
        """What workers must know of the mode."""
        if isinstance(self.mode, Asynchronous):
            return f"asynchronous, staleness {self.mode.staleness}"
        return f"{self.mode.steps} local steps" if isinstance(self.mode, LocalSteps) else "one step"

    @property
    def is_asynchronous(self) -> bool:
        """Whether each shard is a step of its own."""
        return isinstance(self.mode, Asynchronous)

    @property
    def downlink_name(self) -> str:
        """What travels to the workers, in words."""
        return "of parameters" if self.downlink is None else self.downlink.name

    @property
    def batches(self) -> int:
        """Batches of each step."""
        return self.mode.steps if isinstance(self.mode, LocalSteps) else 1

    def needed(self, shards: int) -> int:
        """How many of so many shards of a step suffice."""
        return self.mode.needed(shards) if isinstance(self.mode, Synchronous) else shards

    @property
    def extra(self) -> int:
        """Shards that may be added to a step: as many as can be late in one, so that no more are ever owed."""
        return max(1, self.shards - self.needed(self.shards))

    @property
    def backups(self) -> int:
        """Shards of a step that may be out a second time at once."""
        return self.mode.backups if isinstance(self.mode, Synchronous) else 0

    @property
    def name(self) -> str:
        return self.keys.run
