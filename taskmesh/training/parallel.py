"""How the ranks of a group may hold a model in other ways than each all of it: FSDP, DeepSpeed and the like."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor, nn


class Parallel(Protocol):
    """One model over the ranks of a group: what ``Execution(parallel=...)`` makes, one on each rank and for each run.

    All ranks call the same methods in the same order, and compute equally many passes; a rank that has no sample of its
    own in one computes another's, with a loss of zero. So every method, forward and backward may hold collectives, in
    any group but taskmesh's own. Names are those of ``named_parameters()`` before ``wrap``.
    """

    def wrap(self, model: nn.Module, /) -> nn.Module:
        """Take over a model; once, before anything else.

        Returns what the loss function and inference are given. The model's buffers stay where they are.
        """
        ...

    def load(self, values: Mapping[str, Tensor], /) -> None:
        """Let the model have these parameters: fp32, on the CPU, whole, the same on every rank."""
        ...

    def backward(self, loss: Tensor, /) -> None:
        """Add the gradient of a pass's loss, which is the sum over this rank's samples, to what is there."""
        ...

    def gradient(self, into: Mapping[str, Tensor], /) -> None:
        """After the last backward: write the whole gradient, summed (not averaged) over the ranks, and begin anew.

        Only what is written on rank 0 is used. What has no gradient is zero.
        """
        ...
