"""A run's model on the ranks of a group, which compute each shard together and act as one worker.

Rank 0 leads: it alone serves the queue and sends gradients, and it tells the others of each shard. Each rank computes
a part of every pass, and the gradients are summed over the ranks, bucket by bucket, while backward is at the others, as
DistributedDataParallel does it (Li et al., "PyTorch Distributed", 2020). It is not that class: loss functions are given
the model itself, a bucket leaves for the master as soon as it is summed, and when one rank fails, all end the shard.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from taskmesh import tensors
from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import TrainingError
from taskmesh.tensors import FlatLayout, FlatModel, drawing
from taskmesh.training.execution import is_out_of_memory
from taskmesh.training.orders import ShardOrder
from taskmesh.training.plan import split
from taskmesh.training.seeds import derive
from taskmesh.training.worker.payload import Sink, pack_buffers
from taskmesh.training.worker.ranks import Ranks
from taskmesh.training.worker.replica import Recipe, Replica
from taskmesh.training.worker.sums import Seen, Sums

log = logging.getLogger("taskmesh.training")
T = TypeVar("T")
FINE, OUT_OF_MEMORY, FAILED = range(3)


class ShardCall(msgspec.Struct, frozen=True, tag=True):
    """A shard is computed."""

    run: str
    order: ShardOrder


class InferenceCall(msgspec.Struct, frozen=True, tag=True):
    """A batch of inputs is inferred; ``rows`` is the tensor as it travels."""

    run: str
    part: Part
    layout: str
    rows: bytes


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The group parts."""


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Nothing is to do, and the leader is well."""


Call = ShardCall | InferenceCall | Stop | Pause


def tell(ranks: Ranks, call: Call) -> None:
    """The leader's word to the others."""
    ranks.tell(msgspec.msgpack.encode(call))


def assist(ranks: Ranks, members: Mapping[str, Member]) -> None:
    """Do as the leader says until it says to stop; ``members`` by their runs' names. In the compute thread."""
    decoder = msgspec.msgpack.Decoder(Call)
    while True:
        call: Call = decoder.decode(ranks.hear())
        if isinstance(call, Stop):
            return
        if isinstance(call, Pause):
            continue
        try:
            if isinstance(call, ShardCall):
                members[call.run].assist(call.order)
            else:
                members[call.run].assist_inference(call.part, call.layout, tensors.decode(call.rows))
        except Exception as error:
            # The leader has failed with it, and says so to the master.
            log.warning("run %s: rank %d: %s: %s", call.run, ranks.rank, type(error).__name__, error)


class StandIn(tuple[int, ...]):
    """Samples that are another rank's: they are computed, and count for nothing."""


class Member(Replica):
    """One rank's copy of a run's model.

    The leader calls ``compute`` and ``infer`` as of any replica; meanwhile the others are in ``assist``.
    """

    def __init__(self, recipe: Recipe, ranks: Ranks) -> None:
        super().__init__(recipe)
        self._ranks = ranks
        make = recipe.execution.parallel
        self._parallel = None if make is None else make()
        self._is_wrapped = False
        self._given: Part | None = None  # the version that it has
        self._shared: Part | None = None  # the one whose parameters all ranks have
        self._parameters = memoryview(b"")
        self._sums: list[Tensor] = []
        self._own: Tensor | None = None
        self._mean_buffers = b""

    # the others' part

    def assist(self, order: ShardOrder) -> None:
        """Compute a shard with the leader.

        Raises:
            Exception: it has failed on some rank, and so on all.
        """
        flat = self._prepare(order, self._parameters, self._sums)
        self._differentiate(flat, order, Seen(self._sums[0], self._buckets))

    def assist_inference(self, part: Part, layout: str, rows: Tensor) -> None:
        """Infer with the leader."""
        self._infer(part, layout, rows, self._parameters)

    # what the leader and the others do alike

    def infer(self, part: Part, layout: str, rows: Tensor, parameters: memoryview) -> Tensor:
        """The model's outputs for a batch of inputs. The leader needs the others only where they share the model."""
        if self._parallel is None:
            return super().infer(part, layout, rows, parameters)
        tell(self._ranks, InferenceCall(self._recipe.run, part, layout, tensors.encode(rows)))
        return self._infer(part, layout, rows, parameters)

    def _infer(self, part: Part, layout: str, rows: Tensor, parameters: memoryview) -> Tensor:
        parameters = self._share(part, parameters)
        return self._agree(lambda: super(Member, self).infer(part, layout, rows, parameters))

    def _prepare(self, order: ShardOrder, parameters: memoryview, memory: list[Tensor]) -> FlatModel:
        if self._ranks.leads:
            tell(self._ranks, ShardCall(self._recipe.run, order))
        parameters = self._share(order.parameters, parameters)
        flat = self._agree(lambda: super(Member, self)._prepare(order, parameters, memory))
        if self._own is None:
            self._own = torch.empty(flat.layout.parameter_count, device=self._device)
        flat.use_gradient(self._own)
        return flat

    def _share(self, part: Part, parameters: memoryview) -> memoryview:
        """A version's parameters, which the leader has."""
        if self._shared != part:
            if not self._ranks.leads and len(self._parameters) != part.size_bytes:
                self._parameters = memoryview(bytearray(part.size_bytes))
            self._ranks.share(parameters if self._ranks.leads else self._parameters)
            self._shared = part
        return parameters if self._ranks.leads else self._parameters

    def _model(self) -> FlatModel:
        flat = super()._model()
        if self._parallel is not None and not self._is_wrapped:
            self._callable = self._recipe.execution.callable(self._parallel.wrap(flat.model))
            self._is_wrapped = True
        return flat

    def _load(self, part: Part, layout: str, parameters: memoryview) -> FlatModel:
        flat = super()._load(part, layout, parameters)
        if self._parallel is not None and self._given != part:
            self._given = None
            trained = torch.frombuffer(parameters, dtype=torch.float32, count=flat.layout.parameter_count)
            self._parallel.load(by_name(flat.layout, trained))
            self._given = part
        return flat

    def _chance(self, order: ShardOrder) -> AbstractContextManager[None]:
        rank, recipe = self._ranks.rank, self._recipe
        if not rank:
            return super()._chance(order)
        return drawing(
            derive(recipe.run, recipe.seed, "shard", order.step, order.shard, "rank", rank, bits=64)
        )

    def _parts(self, order: ShardOrder) -> Sequence[Sequence[int]]:
        return [self._part(indices, self._ranks.rank) for indices in self._passes(order)]

    def _largest_part(self, order: ShardOrder) -> int:
        return max(len(self._part(indices, 0)) for indices in self._passes(order))  # on all ranks alike

    def _passes(self, order: ShardOrder) -> list[Sequence[int]]:
        """What all ranks compute at once: as often on each."""
        if self._micro_batch is None:
            return list(order.batches())
        at_once = self._micro_batch * self._ranks.size
        return [part for each in order.batches() for part in split(each, -(-len(each) // at_once))]

    def _part(self, indices: Sequence[int], rank: int) -> Sequence[int]:
        parts = split(indices, self._ranks.size)
        return parts[rank] if rank < len(parts) else StandIn(parts[0])

    def _loss(self, indices: Sequence[int]) -> tuple[Tensor, int]:
        loss, count = super()._loss(indices)
        return (loss * 0, 0) if isinstance(indices, StandIn) else (loss, count)

    def _go_back(self, loss: Tensor) -> None:
        if self._parallel is None:
            super()._go_back(loss)
        else:
            self._parallel.backward(loss)

    def _buffers_of(self, flat: FlatModel) -> bytes:
        return self._mean_buffers

    def _pass(self, flat: FlatModel, order: ShardOrder, scale: float, payload: Sink) -> tuple[float, int]:
        if self._parallel is None:
            total, count, buffers = self._sum(flat, order, scale, payload)
        else:
            total, count, buffers = self._agree(lambda: self._collect(flat, order, payload))
        found = self._ranks.gather(total, count)
        loss, samples = sum(each[0] for each in found), int(sum(each[1] for each in found))
        self._mean_buffers = self._average(flat.layout, buffers, count, samples)
        return loss, samples

    def _sum(
        self, flat: FlatModel, order: ShardOrder, scale: float, payload: Sink
    ) -> tuple[float, int, bytes]:
        """The gradients of all ranks, summed while backward goes on; this rank's loss, samples and buffers."""
        assert self._own is not None
        sums = Sums(self._ranks, self._buckets, self._own, torch.from_numpy(payload.gradient), payload.add)

        def work() -> tuple[float, int, bytes]:
            try:
                total, count = self._accumulate(flat, order, scale, sums.add)
                sums.finish()
                return total, count, pack_buffers(flat)
            finally:
                sums.settle()

        found = self._agree(work)
        late = torch.zeros(len(self._buckets))
        late[list(sums.late)] = 1
        self._ranks.sum(late)
        sums.repeat([place for place, ranks in enumerate(late.tolist()) if ranks])
        return found

    def _collect(self, flat: FlatModel, order: ShardOrder, payload: Sink) -> tuple[float, int, bytes]:
        """The gradient of a model that the ranks share."""
        assert self._parallel is not None
        total, count = self._accumulate(flat, order, 1, _leave)
        into = torch.from_numpy(payload.gradient).zero_()
        self._parallel.gradient(by_name(flat.layout, into))
        for place in range(len(self._buckets)):
            payload.add(place)
        return total, count, pack_buffers(flat)

    def _average(self, layout: FlatLayout, buffers: bytes, count: int, samples: int) -> bytes:
        """The buffers of a shard: what they changed by is averaged over its samples, integers are rank 0's."""
        size = layout.float_count - layout.parameter_count
        if not size:
            return buffers
        changes = torch.from_numpy(np.frombuffer(buffers, np.float32, size) * np.float32(count))
        self._ranks.sum(changes)
        return changes.div_(max(1, samples)).numpy().tobytes() + buffers[4 * size :]

    def _agree(self, work: Callable[[], T]) -> T:
        """Do something on all ranks.

        Raises:
            Exception: on all ranks, when it fails on any.
        """
        error: Exception | None = None
        found: list[T] = []
        try:
            found.append(work())
        except Exception as caught:
            error = caught
            # The others may be in the model's own collectives, and would wait there for this rank.
            if self._parallel is not None and not self._ranks.all_failed():
                self._ranks.end("".join(traceback.format_exception(error)))
        self._compare(error)
        return found[0]

    def _compare(self, error: Exception | None) -> None:
        """Hear how the ranks have fared, and say so.

        Raises:
            Exception: this rank's own, where it is the worst there is.
            OutOfMemoryError: memory has run out on another rank.
            TrainingError: another rank has failed; the message holds its traceback.
        """
        mine = FINE if error is None else OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        states = [int(state) for (state,) in self._ranks.gather(mine)]
        worst = max(states)
        if worst == FINE:
            return
        texts = self._ranks.texts("" if error is None else "".join(traceback.format_exception(error)))
        if error is not None and mine == worst:
            raise error
        rank = states.index(worst)
        if worst == OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"rank {rank}: {texts[rank].splitlines()[-1]}")
        raise TrainingError(
            f"run {self._recipe.run!r}: rank {rank} of the group of {self._ranks.size} failed:\n{texts[rank]}"
        )


def by_name(layout: FlatLayout, values: Tensor) -> dict[str, Tensor]:
    """The parts of flat parameters, or of a flat gradient, as the model has them."""
    return {
        slot.name: values[slot.offset : slot.offset + slot.size].view(slot.shape)
        for slot in layout.parameters
    }


def _leave(place: int) -> None:
    """A bucket of a rank's own gradient, which is not what is looked for."""
