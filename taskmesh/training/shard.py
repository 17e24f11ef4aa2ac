"""The worker's side of a step: one shard's gradient, and inference for evaluation.

A worker process fetches the parameters of a version once, whatever the number of its shards. The loss is summed
over the shard's samples and travels with their count; the gradient is that of the sum.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from taskmesh.app.mesh import Mesh
from taskmesh.broker import chunks
from taskmesh.checkpoints.manifest import Part, checksum_of
from taskmesh.checkpoints.store import VersionStore
from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.keys import RunKeys
from taskmesh.tasks import Context
from taskmesh.tensors import FlatModel, drawing
from taskmesh.training.buckets import Bucket, cut
from taskmesh.training.compression.base import Compression, Values
from taskmesh.training.compute import compute, use_threads
from taskmesh.training.data import Dataset
from taskmesh.training.room import when_there_is_room
from taskmesh.training.seeds import derive

# Riding in the result is no faster (9,610 parameters, 8 shards, one machine: 10.5 to 11.4 ms a step either way), and
# a result is written twice into the append-only file of the durable server; it saves small models their keys.
INLINE_BYTES = 4 * 1024
GRADIENT_TTL_MS = 600_000
_CACHED_VERSIONS = 2

# The unreduced losses, one a sample or token; or their sum (with its graph) and their count.
Loss = Tensor | tuple[Tensor, int]
LossFunction = Callable[[nn.Module, Any], Loss]


@dataclass(frozen=True, slots=True)
class ShardOrder:
    """What a worker is told to compute.

    Attributes:
        agreement: what this master and its workers must have alike (``RunSetup.agreement``).
        avoid: workers that leave it to others.
    """

    version: int
    step: int
    shard: int
    indices: tuple[int, ...]
    parameters: Part
    layout: str
    agreement: str
    avoid: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ShardResult:
    """What came of it.

    The payload is the gradient, compressed bucket by bucket, then the float and the integer buffers, where there are
    any. Small ones ride in the result, large ones lie in chunks, one a piece.

    Attributes:
        status: "computed"; "refused" for a loss or gradient that is not finite; "declined" by a worker that was to
            be avoided; "gone" when the parameters could not be fetched.
        reason: of a refusal, in words.
        sizes: bytes of each piece of the payload.
        digests: of each piece, where they lie in chunks.
        attempt: names the delivery, where they do.
    """

    status: Literal["computed", "refused", "declined", "gone"]
    worker: str
    reason: str = ""
    loss_sum: float = 0.0
    count: int = 0
    sizes: tuple[int, ...] = ()
    inline: bytes = b""
    attempt: str = ""
    digests: tuple[bytes, ...] = ()


class Recipe(NamedTuple):
    """What every process of a run has alike, because it imports the same module.

    Attributes:
        build: makes the model.
        threads: torch's intra-op threads while a shard is computed.
        agreement: what it has alike, in words.
    """

    run: str
    build: Callable[[], nn.Module]
    loss: LossFunction
    data: Dataset[Any]
    compression: Compression
    seed: int
    threads: int
    agreement: str


class _Computed(NamedTuple):
    """``digests`` are those of the payload's pieces; a payload that rides in the result has none."""

    reason: str | None
    loss_sum: float = 0.0
    samples: int = 0
    pieces: tuple[memoryview, ...] = ()
    digests: tuple[bytes, ...] = ()


class Replica:
    """A process's copy of the model, and the handlers that use it."""

    def __init__(self, mesh: Mesh, keys: RunKeys, recipe: Recipe) -> None:
        self._mesh = mesh
        self._keys = keys
        self._recipe = recipe
        self._flat: FlatModel | None = None
        self._loaded: Part | None = None
        self._buckets: tuple[Bucket, ...] = ()
        self._fetches: OrderedDict[Part, asyncio.Task[memoryview]] = OrderedDict()

    # the handlers

    async def gradient(self, order: ShardOrder, context: Context) -> ShardResult:
        """Compute one shard.

        Raises:
            TrainingError: this process has another model, or a loss function that does not do what it must.
        """
        if context.worker in order.avoid:
            return ShardResult("declined", context.worker)
        try:
            parameters = await self._fetch(order.parameters)
        except CheckpointError as error:
            return ShardResult("gone", context.worker, str(error))
        found = await compute(self._compute, order, parameters)
        if found.reason is not None:
            return ShardResult("refused", context.worker, found.reason)
        result = ShardResult(
            "computed",
            context.worker,
            "",
            found.loss_sum,
            found.samples,
            tuple(piece.nbytes for piece in found.pieces),
            digests=found.digests,
        )
        if not found.digests:
            return dataclasses.replace(result, inline=b"".join(found.pieces))
        attempt = f"{context.task_id}.{context.deliveries}"
        keys = [
            self._keys.gradient(order.version, order.shard, attempt, place)
            for place in range(len(found.pieces))
        ]
        bulk = self._mesh.client.bulk
        await when_there_is_room(
            lambda: chunks.put(bulk, keys, found.pieces, GRADIENT_TTL_MS), f"run {self._recipe.run}"
        )
        return dataclasses.replace(result, attempt=attempt)

    async def infer(self, parameters: Part, layout: str, rows: Tensor) -> Tensor:
        """The model's outputs for a batch of inputs, in evaluation mode.

        Raises:
            CheckpointError: the parameters are gone.
        """
        values = await self._fetch(parameters)
        return await compute(self._infer, parameters, layout, rows, values)

    # parameters

    async def _fetch(self, part: Part) -> memoryview:
        """The parameters of a version, fetched once however many ask."""
        fetch = self._fetches.get(part)
        if fetch is None or fetch.cancelled() or (fetch.done() and fetch.exception() is not None):
            client = self._mesh.client
            store = VersionStore(client.caller, client.bulk, self._keys)
            fetch = self._fetches[part] = asyncio.create_task(store.load(part), name="taskmesh parameters")
            while len(self._fetches) > _CACHED_VERSIONS:
                self._fetches.popitem(last=False)
        return await asyncio.shield(fetch)

    # in the compute thread

    def _load(self, part: Part, layout: str, values: memoryview) -> FlatModel:
        if self._flat is None:
            with drawing(derive(self._recipe.seed, "model", bits=64)):
                self._flat = FlatModel(self._recipe.build())
            self._buckets = cut(self._flat.layout, whole=self._recipe.compression.takes_whole_parameters)
        if self._flat.layout.digest != layout:
            raise TrainingError(
                f"run {self._recipe.run!r}: this worker's model has another layout than the master's "
                f"({self._flat.layout.digest} and {layout}); it runs other code"
            )
        if self._loaded != part:
            self._loaded = None
            self._flat.load(values)
            self._loaded = part
        else:
            self._flat.spread_buffers()  # the last forward pass has changed them
        return self._flat

    def _compute(self, order: ShardOrder, parameters: memoryview) -> _Computed:
        recipe = self._recipe
        if order.agreement != recipe.agreement:
            raise TrainingError(
                f"run {recipe.run!r}: this worker goes by {recipe.agreement}, the master by {order.agreement}; "
                "it runs other code"
            )
        use_threads(recipe.threads)
        flat = self._load(order.parameters, order.layout, parameters)
        flat.model.train()
        flat.zero_gradient()
        with drawing(derive(recipe.run, recipe.seed, "shard", order.step, order.shard, bits=64)):
            losses = recipe.loss(flat.model, recipe.data.fetch(order.indices))
            loss, count = sum_and_count(losses)
            loss.backward()  # type: ignore[no-untyped-call]
        gradient = flat.collect_gradient().numpy()
        loss_sum = float(loss.detach())
        if not math.isfinite(loss_sum):
            return _Computed(f"the loss is {loss_sum}")
        if not np.isfinite(gradient).all():
            return _Computed("the gradient is not finite")
        pieces = self._compress(gradient, order)
        if buffers := _buffers(flat):
            pieces.append(memoryview(buffers))
        is_small = sum(piece.nbytes for piece in pieces) <= INLINE_BYTES
        digests = () if is_small else tuple(map(checksum_of, pieces))
        return _Computed(None, loss_sum, count, tuple(pieces), digests)

    def _compress(self, gradient: Values, order: ShardOrder) -> list[memoryview]:
        recipe = self._recipe
        compressed: list[memoryview] = []
        for place, bucket in enumerate(self._buckets):
            key = derive(recipe.run, recipe.seed, "rounding", order.step, order.shard, place)
            values = gradient[bucket.start : bucket.stop]
            compressed.append(memoryview(recipe.compression.compress(values, key, bucket)).cast("B"))
        return compressed

    def _infer(self, part: Part, layout: str, rows: Tensor, values: memoryview) -> Tensor:
        use_threads(self._recipe.threads)
        model = self._load(part, layout, values).model
        model.eval()
        # Not inference_mode: what the model caches in it could not be used in a training step later.
        with torch.no_grad():
            outputs = model(rows)
        if not isinstance(outputs, Tensor):
            raise TrainingError(
                f"run {self._recipe.run!r}: the model returns a {type(outputs).__name__}, no tensor"
            )
        return outputs.clone()


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
