"""A process's copy of a run's model: one shard's gradient at a time, and inference. All in the compute thread.

The loss is summed over the shard's samples and travels with their count; the gradient is that of the sum.
"""

from __future__ import annotations

import functools
import gc
import logging
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from taskmesh.checkpoints.manifest import Part
from taskmesh.errors import TrainingError
from taskmesh.tensors import FlatModel, drawing
from taskmesh.training.buckets import Bucket, cut
from taskmesh.training.compression.base import Compression
from taskmesh.training.compute import use_threads
from taskmesh.training.data import Dataset
from taskmesh.training.execution import Execution, is_out_of_memory, to_device
from taskmesh.training.memory import Held, State
from taskmesh.training.orders import ShardOrder
from taskmesh.training.plan import split
from taskmesh.training.seeds import derive
from taskmesh.training.step.learner import Learner
from taskmesh.training.worker.backward import Backward
from taskmesh.training.worker.local import Inner, Local
from taskmesh.training.worker.payload import Payload, Sink, Take, pack_buffers

log = logging.getLogger("taskmesh.training")
# The unreduced losses, one a sample or token; or their sum (with its graph) and their count.
Loss = Tensor | tuple[Tensor, int]
LossFunction = Callable[[nn.Module, Any], Loss]


class Recipe(NamedTuple):
    """What every process of a run has alike, because it imports the same module.

    Attributes:
        build: makes the model.
        threads: torch's intra-op threads while a shard is computed.
        agreement: what it has alike, in words.
        fingerprint: what its bits depend on beside that.
        execution: how shards are computed.
        may_split: a worker that runs out of memory may compute a shard in smaller parts.
        local: what a shard steps with, where it takes steps of its own.
        follow: makes a copy of the master's optimizer and what it needs, to step by what the master sends; None where
            it sends parameters.
    """

    run: str
    build: Callable[[], nn.Module]
    loss: LossFunction
    data: Dataset[Any]
    compression: Compression
    seed: int
    threads: int
    agreement: str
    fingerprint: str
    execution: Execution
    may_split: bool
    local: Local | None
    follow: Callable[[], Learner] | None


class Computed(NamedTuple):
    """What came of a shard.

    Attributes:
        reason: why its gradient cannot be used; None when it can.
        pieces: the gradient, compressed, bucket by bucket, and the buffers, where there are any.
        digests: of the pieces.
        memory: what the compression remembers of it, where it remembers anything.
    """

    reason: str | None
    loss_sum: float = 0.0
    samples: int = 0
    pieces: tuple[memoryview, ...] = ()
    digests: tuple[bytes, ...] = ()
    memory: State = ()


class Gradients:
    """Memory for gradients: that of one shard may still be on its way while the next one is computed."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()

    @contextmanager
    def lend(self) -> Iterator[list[Tensor]]:
        """A place for a gradient, which is free again at the end. Any thread."""
        with self._lock:
            lent = [self._free.pop()] if self._free else []
        try:
            yield lent
        finally:
            with self._lock:
                self._free += lent


class Replica:
    """The model, and what is done with it."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._device = torch.device("cpu")
        self._flat: FlatModel | None = None
        self._callable: nn.Module | None = None
        self._loaded: tuple[Part, memoryview] | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._backward: Backward | None = None
        self._micro_batch = recipe.execution.micro_batch

    def compute(
        self,
        order: ShardOrder,
        parameters: memoryview,
        memory: list[Tensor],
        state: Held | None,
        take: Take,
    ) -> Computed:
        """Compute one shard.

        Args:
            memory: where its gradient is to lie; filled when it is empty.
            state: what its compression goes on from; None for nothing.
            take: is given each piece of the payload as soon as it is there. What it is given lies in ``memory``, or is
                its own.

        Raises:
            TrainingError: this process has another model, or a loss function that does not do what it must; or memory
                ran out, and the run's bits forbid to compute it in smaller parts.
        """
        recipe = self._recipe
        if order.agreement != recipe.agreement:
            raise TrainingError(
                f"run {recipe.run!r}: this worker goes by {recipe.agreement}, the master by {order.agreement}; "
                "it runs other code"
            )
        flat = self._prepare(order, parameters, memory)
        seed = (recipe.run, recipe.seed, "rounding", order.step, order.shard)
        payload = Payload(recipe.compression, self._buckets, memory[0], seed, state, take)
        if recipe.local is None:
            loss_sum, count = self._differentiate(flat, order, payload)
        else:
            step = functools.partial(self._step, flat, order, parameters, recipe.local)
            loss_sum, count = self._in_memory(step, order)
            self._add_change(flat, parameters, count, payload)
        if not math.isfinite(loss_sum):
            return Computed(f"the loss is {loss_sum}")
        if not payload.is_finite:
            return Computed("the gradient is not finite")
        if buffers := self._buffers_of(flat):
            payload.add_piece(len(self._buckets), memoryview(buffers))
        return Computed(None, loss_sum, count, payload.pieces, payload.digests, payload.memory)

    def _prepare(self, order: ShardOrder, parameters: memoryview, memory: list[Tensor]) -> FlatModel:
        """The model as a shard begins with it."""
        use_threads(self._recipe.threads)
        flat = self._load(order.parameters, order.layout, parameters)
        if not memory:
            memory.append(torch.empty(flat.layout.parameter_count))
        flat.use_gradient(memory[0])
        flat.model.train()
        return flat

    def _buffers_of(self, flat: FlatModel) -> bytes:
        """What became of the buffers."""
        return pack_buffers(flat)

    def _chance(self, order: ShardOrder) -> AbstractContextManager[None]:
        recipe = self._recipe
        return drawing(derive(recipe.run, recipe.seed, "shard", order.step, order.shard, bits=64))

    def _loss(self, indices: Sequence[int]) -> tuple[Tensor, int]:
        """The sum of some samples' losses, and how many there are."""
        recipe = self._recipe
        assert self._callable is not None
        batch = to_device(recipe.data.fetch(indices), self._device)
        with recipe.execution.autocast(self._device):
            return sum_and_count(recipe.loss(self._callable, batch))

    def _differentiate(self, flat: FlatModel, order: ShardOrder, payload: Sink) -> tuple[float, int]:
        """The gradient of the losses' sum; the sum and how many there are."""
        total, count = math.nan, 0
        for scale in self._recipe.execution.scales:
            payload.is_finite = True
            total, count = self._in_memory(functools.partial(self._pass, flat, order, scale, payload), order)
            if payload.is_finite:
                break
            flat.spread_buffers()
        return total, count

    def _in_memory(self, work: Callable[[], tuple[float, int]], order: ShardOrder) -> tuple[float, int]:
        """Do something that may run out of memory; again with fewer samples at once, where it does."""
        while True:
            try:
                return work()
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._make_smaller(self._largest_part(order), error)
                self._model().spread_buffers()

    def _cut(self, indices: Sequence[int]) -> Sequence[Sequence[int]]:
        """A batch in micro-batches, as few as there can be."""
        if self._micro_batch is None:
            return [indices]
        return split(indices, -(-len(indices) // self._micro_batch))

    def _parts(self, order: ShardOrder) -> Sequence[Sequence[int]]:
        """What is computed at once."""
        return [part for indices in order.batches() for part in self._cut(indices)]

    def _largest_part(self, order: ShardOrder) -> int:
        return max(map(len, self._parts(order)))

    def _pass(self, flat: FlatModel, order: ShardOrder, scale: float, payload: Sink) -> tuple[float, int]:
        return self._accumulate(flat, order, scale, payload.add)

    def _accumulate(
        self, flat: FlatModel, order: ShardOrder, scale: float, tell: Callable[[int], None]
    ) -> tuple[float, int]:
        """Backward over all parts; ``tell`` is called with the number of each bucket that is complete."""
        assert self._backward is not None
        parts = self._parts(order)
        flat.zero_gradient()
        total, count = 0.0, 0
        with self._chance(order):
            for place, indices in enumerate(parts):
                loss, samples = self._loss(indices)
                if scale == 1 and place == len(parts) - 1:
                    self._backward.begin(tell)
                self._go_back(loss * scale if scale != 1 else loss)
                total, count = total + float(loss.detach()), count + samples
        if scale == 1:
            self._backward.finish()
        else:
            flat.collect_gradient().mul_(1 / scale)
            for bucket in range(len(self._buckets)):
                tell(bucket)
        return total, count

    def _go_back(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _make_smaller(self, largest: int, error: Exception) -> None:
        """Memory has run out: from now on, half as many samples at once.

        Raises:
            TrainingError: the bits depend on it, or there is nothing to halve.
        """
        run, reason = self._recipe.run, str(error).splitlines()[0]
        if not self._recipe.may_split:
            raise TrainingError(
                f"run {run!r}: out of memory with {largest} samples at once: {reason}. Give the Trainer "
                f"Execution(micro_batch={max(1, largest // 2)}), or deterministic=False to let each worker find its own"
            ) from None
        if largest == 1:
            raise TrainingError(f"run {run!r}: out of memory with a single sample: {reason}") from None
        self._micro_batch = -(-largest // 2)
        log.warning(
            "run %s: out of memory; from now on %d samples at once: %s", run, self._micro_batch, reason
        )
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def _step(
        self, flat: FlatModel, order: ShardOrder, parameters: memoryview, local: Local
    ) -> tuple[float, int]:
        """Steps of the shard's own, from the version's parameters."""
        flat.load(parameters)  # the steps change them, and they are others' too
        self._loaded = None
        batches = order.batches()
        inner = Inner(local, flat.model, (order.step - 1) * local.steps)
        total, count = 0.0, 0
        with self._chance(order):
            for indices in batches:
                inner.begin()
                batch_total, batch_count = 0.0, 0
                for part in self._cut(indices):
                    loss, samples = self._loss(part)
                    loss.backward()  # type: ignore[no-untyped-call]
                    batch_total, batch_count = batch_total + float(loss.detach()), batch_count + samples
                inner.step(batch_count)
                total, count = total + batch_total, count + batch_count
        flat.collect_parameters()
        return total, count

    def _add_change(self, flat: FlatModel, parameters: memoryview, count: int, payload: Payload) -> None:
        """In the gradient's place: how far the shard's steps led away, times its samples."""
        trained = flat.layout.parameter_count
        begun = np.frombuffer(parameters, np.float32, trained)
        np.subtract(begun, flat.values[:trained].numpy(), out=payload.gradient)
        payload.gradient *= np.float32(count)
        for bucket in range(len(self._buckets)):
            payload.add(bucket)

    def infer(self, part: Part, layout: str, rows: Tensor, parameters: memoryview) -> Tensor:
        """The model's outputs for a batch of inputs, in evaluation mode."""
        use_threads(self._recipe.threads)
        model = self._load(part, layout, parameters).model
        model.eval()
        # Not inference_mode: what the model caches in it could not be used in a training step later.
        with torch.no_grad(), self._recipe.execution.autocast(self._device):
            outputs = model(rows.to(self._device))
        if not isinstance(outputs, Tensor):
            raise TrainingError(
                f"run {self._recipe.run!r}: the model returns a {type(outputs).__name__}, no tensor"
            )
        return outputs.cpu().clone()

    def _model(self) -> FlatModel:
        if self._flat is None:
            with drawing(derive(self._recipe.seed, "model", bits=64)):
                model = self._recipe.build()
            execution = self._recipe.execution
            self._device = execution.resolve_device()
            self._flat = FlatModel(execution.prepare(model, self._device))
            self._callable = execution.callable(self._flat.model)
            self._buckets = cut(self._flat.layout, whole=self._recipe.compression.takes_whole_parameters)
            self._backward = Backward(self._flat, self._buckets)
        return self._flat

    def _load(self, part: Part, layout: str, parameters: memoryview) -> FlatModel:
        flat = self._model()
        if flat.layout.digest != layout:
            raise TrainingError(
                f"run {self._recipe.run!r}: this worker's model has another layout than the master's "
                f"({flat.layout.digest} and {layout}); it runs other code"
            )
        # The same memory may hold another version by now, and the same version lie elsewhere.
        if self._loaded is None or self._loaded[0] != part or self._loaded[1] is not parameters:
            self._loaded = None
            flat.borrow(parameters)
            self._loaded = part, parameters
        else:
            flat.spread_buffers()  # the last forward pass has changed them
        return flat


def sum_and_count(losses: Loss) -> tuple[Tensor, int]:
    """A loss function's answer as sum and count.

    Raises:
        TrainingError: it is a single number, of which nobody can tell whether it is a sum or a mean.
    """
    if isinstance(losses, tuple):
        return losses[0], int(losses[1])
    if losses.dim() == 0:
        raise TrainingError(
            "the loss function returned a single number: return the losses of the samples unreduced "
            "(reduction='none'), or (sum, count)"
        )
    return losses.sum(), losses.numel()
