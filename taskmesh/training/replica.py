"""A process's copy of a run's model: one shard's gradient at a time, and inference. All in the compute thread.

The loss is summed over the shard's samples and travels with their count; the gradient is that of the sum.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from taskmesh.checkpoints.manifest import Part, checksum_of
from taskmesh.errors import TrainingError
from taskmesh.tensors import FlatModel, drawing
from taskmesh.training.backward import Backward
from taskmesh.training.buckets import Bucket, cut
from taskmesh.training.compression.base import Compression, Memory
from taskmesh.training.compute import use_threads
from taskmesh.training.data import Dataset
from taskmesh.training.local import Inner, Local
from taskmesh.training.memory import State, copy, fresh
from taskmesh.training.orders import ShardOrder
from taskmesh.training.seeds import derive

# The unreduced losses, one a sample or token; or their sum (with its graph) and their count.
Loss = Tensor | tuple[Tensor, int]
LossFunction = Callable[[nn.Module, Any], Loss]
Take = Callable[[int, memoryview], None]


class Recipe(NamedTuple):
    """What every process of a run has alike, because it imports the same module.

    Attributes:
        build: makes the model.
        threads: torch's intra-op threads while a shard is computed.
        agreement: what it has alike, in words.
        fingerprint: what its bits depend on beside that.
        local: what a shard steps with, where it takes steps of its own.
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
    local: Local | None


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
        self._flat: FlatModel | None = None
        self._loaded: tuple[Part, memoryview] | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._backward: Backward | None = None

    def compute(
        self,
        order: ShardOrder,
        parameters: memoryview,
        memory: list[Tensor],
        state: State | None,
        take: Take,
    ) -> Computed:
        """Compute one shard.

        Args:
            memory: where its gradient is to lie; filled when it is empty.
            state: what its compression goes on from; None for nothing.
            take: is given each piece of the payload as soon as it is there, by its place; a piece may come again,
                changed. What it is given lies in ``memory``, or is its own.

        Raises:
            TrainingError: this process has another model, or a loss function that does not do what it must.
        """
        recipe = self._recipe
        if order.agreement != recipe.agreement:
            raise TrainingError(
                f"run {recipe.run!r}: this worker goes by {recipe.agreement}, the master by {order.agreement}; "
                "it runs other code"
            )
        use_threads(recipe.threads)
        flat = self._load(order.parameters, order.layout, parameters)
        if recipe.local is not None:
            flat.load(parameters)  # it changes them, and they are others' too
            self._loaded = None
        if not memory:
            memory.append(torch.empty(flat.layout.parameter_count))
        flat.use_gradient(memory[0])
        payload = _Payload(self._recipe, self._buckets, memory[0], order, state, take)
        flat.model.train()
        with drawing(derive(recipe.run, recipe.seed, "shard", order.step, order.shard, bits=64)):
            if recipe.local is None:
                loss_sum, count = self._differentiate(flat, order, payload)
            else:
                loss_sum, count = self._step(flat, order, parameters, payload, recipe.local)
        if not math.isfinite(loss_sum):
            return Computed(f"the loss is {loss_sum}")
        if not payload.is_finite:
            return Computed("the gradient is not finite")
        if buffers := _buffers(flat):
            payload.add_piece(len(self._buckets), memoryview(buffers))
        return Computed(None, loss_sum, count, payload.pieces, payload.digests, payload.memory)

    def _differentiate(self, flat: FlatModel, order: ShardOrder, payload: _Payload) -> tuple[float, int]:
        """The gradient of the losses' sum; the sum and how many there are."""
        assert self._backward is not None
        flat.zero_gradient()
        total, count = 0.0, 0
        batches = order.batches()
        for place, indices in enumerate(batches):
            loss, samples = sum_and_count(self._recipe.loss(flat.model, self._recipe.data.fetch(indices)))
            if place == len(batches) - 1:
                self._backward.begin(payload.add)
            loss.backward()  # type: ignore[no-untyped-call]
            total, count = total + float(loss.detach()), count + samples
        self._backward.finish()
        return total, count

    def _step(
        self, flat: FlatModel, order: ShardOrder, parameters: memoryview, payload: _Payload, local: Local
    ) -> tuple[float, int]:
        """Steps of the shard's own. In the gradient's place: how far they led away, times the samples."""
        batches = order.batches()
        inner = Inner(local, flat.model, (order.step - 1) * len(batches))
        total, count = 0.0, 0
        for indices in batches:
            loss, samples = sum_and_count(self._recipe.loss(flat.model, self._recipe.data.fetch(indices)))
            if samples:
                inner.step(loss / samples)
            total, count = total + float(loss.detach()), count + samples
        flat.collect_parameters()
        trained = flat.layout.parameter_count
        begun = np.frombuffer(parameters, np.float32, trained)
        change = payload.gradient
        np.subtract(begun, flat.values[:trained].numpy(), out=change)
        change *= np.float32(count)
        for place in range(len(self._buckets)):
            payload.add(place)
        return total, count

    def infer(self, part: Part, layout: str, rows: Tensor, parameters: memoryview) -> Tensor:
        """The model's outputs for a batch of inputs, in evaluation mode."""
        use_threads(self._recipe.threads)
        model = self._load(part, layout, parameters).model
        model.eval()
        # Not inference_mode: what the model caches in it could not be used in a training step later.
        with torch.no_grad():
            outputs = model(rows)
        if not isinstance(outputs, Tensor):
            raise TrainingError(
                f"run {self._recipe.run!r}: the model returns a {type(outputs).__name__}, no tensor"
            )
        return outputs.clone()

    def _model(self) -> FlatModel:
        if self._flat is None:
            with drawing(derive(self._recipe.seed, "model", bits=64)):
                self._flat = FlatModel(self._recipe.build())
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


class _Payload:
    """One shard's gradient, compressed bucket by bucket as backward finishes them."""

    def __init__(
        self,
        recipe: Recipe,
        buckets: tuple[Bucket, ...],
        gradient: Tensor,
        order: ShardOrder,
        state: State | None,
        take: Take,
    ) -> None:
        self._recipe = recipe
        self._buckets = buckets
        self.gradient = gradient.numpy()
        self._order = order
        self._take = take
        self._state = fresh(recipe.compression, buckets) if state is None else state
        self._memory: dict[int, Memory] = {}
        self._pieces: dict[int, memoryview] = {}
        self._digests: dict[int, bytes] = {}
        self.is_finite = True

    @property
    def pieces(self) -> tuple[memoryview, ...]:
        return tuple(self._pieces[place] for place in sorted(self._pieces))

    @property
    def memory(self) -> State:
        """What the compression remembers of all its buckets; empty where it remembers nothing."""
        return (
            tuple(self._memory.get(place, {}) for place in range(len(self._buckets))) if self._memory else ()
        )

    @property
    def digests(self) -> tuple[bytes, ...]:
        return tuple(self._digests[place] for place in sorted(self._digests))

    def add(self, place: int) -> None:
        """A bucket is complete."""
        recipe, order, bucket = self._recipe, self._order, self._buckets[place]
        values = self.gradient[bucket.start : bucket.stop]
        self.is_finite = self.is_finite and bool(np.isfinite(values).all())
        if self.is_finite:
            key = derive(recipe.run, recipe.seed, "rounding", order.step, order.shard, place)
            memory = copy(self._state[place])  # a bucket may be added again, changed
            compressed = recipe.compression.compress(values, key, bucket, memory or None)
            if memory:
                self._memory[place] = memory
            self.add_piece(place, memoryview(compressed).cast("B"))

    def add_piece(self, place: int, piece: memoryview) -> None:
        self._pieces[place] = piece
        self._digests[place] = checksum_of(piece)
        self._take(place, piece)


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


def _buffers(flat: FlatModel) -> bytes:
    """What the forward pass made of the buffers; the flat buffer keeps those of the version.

    Of float buffers the change: what did not change (a constant, a mask of infinities) then stays as it is, where
    a mean of equal values would be rounded a little further with every step.
    """
    if not flat.layout.floats and not flat.layout.integers:
        return b""
    floats, integers = flat.floats.clone(), flat.integers.clone()
    flat.collect_buffers()
    changes = torch.where(flat.floats == floats, 0.0, flat.floats - floats)
    data: bytes = changes.numpy().tobytes() + flat.integers.numpy().tobytes()
    flat.floats.copy_(floats)
    flat.integers.copy_(integers)
    return data
