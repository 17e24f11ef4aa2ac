"""How the contributions of workers become steps: a value that a run is given."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

from taskmesh.errors import ConfigurationError

log = logging.getLogger("taskmesh.training")
FEW_LOCAL_STEPS = 10


@dataclass(frozen=True, slots=True)
class Synchronous:
    """A step is one step of the run's optimizer, down the mean gradient of all its shards, or of a quorum of them.

    Attributes:
        quorum: how many of a step's shards suffice: a share of them (a float, above 0 and at most 1), or a number of
            them (an int). Those that are late then are owed: their samples enter a later step as further shards.
        backups: so many shards at once may be given to a second worker, when a step waits for nothing else and they
            have been out for longer than they should; the first usable attempt counts. (Chen et al., "Revisiting
            Distributed Synchronous SGD", 2016.)
    """

    quorum: float = 1.0
    backups: int = 0

    def __post_init__(self) -> None:
        is_share = isinstance(self.quorum, float)
        if not self.quorum > 0 or (is_share and self.quorum > 1):
            raise ConfigurationError(f"{self}: quorum is a share above 0 and at most 1, or a number from 1")
        if self.backups < 0:
            raise ConfigurationError(f"{self}: backups from 0")

    def needed(self, shards: int) -> int:
        """How many of so many shards suffice."""
        if isinstance(self.quorum, float):
            return math.ceil(self.quorum * shards - 1e-9)
        return min(self.quorum, shards)


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Each shard is a step of its own, taken when it comes, of parameters that others have changed since.

    What the optimizer makes of its gradient is scaled by 1 / (1 + staleness). (Zhang et al., "Staleness-aware
    Async-SGD for Distributed Deep Learning", 2016.)

    Attributes:
        staleness: so many steps at most are taken between the version that a gradient is of and its own step; a step
            that would leave another gradient older waits for that one. One shard more than that, and no more than the
            run's ``shards``, is under way at once.
    """

    staleness: int = 16

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigurationError(f"{self}: staleness from 0")


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Each shard takes so many steps of the run's optimizer on its own; a step of the run averages where they led to.

    The run's optimizer and schedule are the inner ones; it is made anew for each round. The outer one is SGD with
    Nesterov momentum over the mean change. (Douillard et al., "DiLoCo", 2023.)

    Attributes:
        steps: inner steps of a round.
        lr, momentum: of the outer optimizer.
    """

    steps: int = 20
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigurationError(f"{self}: steps from 1")
        if not self.lr > 0 or not 0 <= self.momentum < 1:
            raise ConfigurationError(f"{self}: lr above 0, momentum from 0 and below 1")
        if self.steps < FEW_LOCAL_STEPS:
            log.warning(
                "%s: with fewer than %d local steps a round costs more than it saves", self, FEW_LOCAL_STEPS
            )


Mode = Synchronous | Asynchronous | LocalSteps
