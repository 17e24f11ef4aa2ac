"""How the contributions of workers become steps: a value that a run is given."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from taskmesh.errors import ConfigurationError

log = logging.getLogger("taskmesh.training")
FEW_LOCAL_STEPS = 10


@dataclass(frozen=True, slots=True)
class Synchronous:
    """A step is one step of the run's optimizer, down the mean gradient of all its shards.

    Attributes:
        backups: so many shards at once may be given to a second worker, when a step waits for nothing else and they
            have been out for longer than they should; the first usable attempt counts. (Chen et al., "Revisiting
            Distributed Synchronous SGD", 2016.)
    """

    backups: int = 0

    def __post_init__(self) -> None:
        if self.backups < 0:
            raise ConfigurationError(f"{self}: backups from 0")


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


Mode = Synchronous | LocalSteps
