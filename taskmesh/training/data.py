"""The data, and the order in which a run goes through it.

The sampler lives in the master. It draws a seeded permutation for each data epoch and hands out batches of it, so
that every index comes once in a data epoch; the last batch of one may be short. The order is a pure function of the
seed and the batch's number: there is no state to save but that number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from taskmesh.errors import ConfigurationError
from taskmesh.training.seeds import derive

T_co = TypeVar("T_co", covariant=True)


class Dataset(Protocol[T_co]):
    """Anything with a length and ``fetch``, in every worker alike: a batch goes by its indices alone.

    It may have an ``identity`` (a text, or a method without arguments that returns one): the version of the data, or a
    digest of all. A run goes on only with data of the identity that it was begun with. Data without one are told from
    others by a few of their samples.
    """

    def __len__(self) -> int: ...

    def fetch(self, indices: Sequence[int], /) -> T_co:
        """The samples of these indices, as the loss function wants them."""
        ...


class Sampler:
    """Batches of indices by number, from 0."""

    def __init__(self, samples: int, batch_size: int, seed: int) -> None:
        if samples < 1:
            raise ConfigurationError("the data has no samples")
        if batch_size < 1:
            raise ConfigurationError(f"batch_size is {batch_size}; it must be at least 1")
        self.samples = samples
        self.batch_size = batch_size
        self.batches_per_epoch = -(-samples // batch_size)
        self._seed = seed
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def epoch_of(self, batch: int) -> int:
        """The data epoch that a batch belongs to, from 0."""
        return batch // self.batches_per_epoch

    def batch(self, number: int) -> list[int]:
        """The indices of one batch."""
        epoch = self.epoch_of(number)
        if epoch != self._epoch:
            generator = np.random.Generator(np.random.Philox(key=derive(self._seed, "order", epoch)))
            self._order = generator.permutation(self.samples)
            self._epoch = epoch
        first = (number - epoch * self.batches_per_epoch) * self.batch_size
        return [int(index) for index in self._order[first : first + self.batch_size]]
