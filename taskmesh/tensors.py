"""Tensors: on the wire, and a model's parameters as one flat buffer.

On the wire a tensor is raw bytes with dtype and shape (the head is that of ``taskmesh.arrays``), bfloat16
included; it arrives on the CPU. The flat buffer of a model is::

    parameters      fp32, each at its offset, tied ones once
    float buffers   fp32 (BatchNorm's running statistics, ...)
    padding         to a multiple of 8 bytes
    integer buffers int64 (counters, masks)

in the host's byte order. Buffers travel with the parameters; what becomes of them in a training step is said in
``taskmesh.training.step.aggregate``. Buffers that are not in the state dict (``persistent=False``) do not travel.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from taskmesh import codec
from taskmesh.arrays import check_length, pack_head, unpack_head
from taskmesh.errors import CheckpointError, ConfigurationError, DecodeError

CODE = 33
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int8,
        torch.uint8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLAT_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_drawing = threading.RLock()


@contextlib.contextmanager
def drawing(seed: int | None = None) -> Iterator[None]:
    """Have the process's global random generators to oneself: torch's, numpy's and Python's, seeded if so wished.

    Whoever builds a model draws from them, in whatever thread; a shard's numbers must not be taken by it.
    """
    with _drawing:
        if seed is not None:
            # torch.manual_seed would format a stack for each kind of device that is not in use: 0.1 ms and more.
            torch.default_generator.manual_seed(seed)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.manual_seed_all(seed)
            np.random.seed(seed % 2**32)
            random.seed(seed)
        yield


def encode(tensor: Tensor) -> bytes:
    """A tensor's bytes; gradients and device stay behind.

    Raises:
        TypeError: sparse, quantised, or of a dtype that does not travel.
    """
    name = _NAMES.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided:
        raise TypeError(f"a tensor of dtype {tensor.dtype} and layout {tensor.layout} cannot travel")
    flat = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return pack_head(b"a", name, tensor.shape) + bytes(flat.view(torch.uint8).numpy().data)


def decode(data: bytes) -> Tensor:
    """The tensor again, on the CPU, in memory of its own.

    Raises:
        DecodeError: the bytes are not a tensor's.
    """
    _, name, shape, start = unpack_head(data)
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise DecodeError(f"no tensor dtype {name!r} is known here")
    if not check_length(len(data) - start, shape, dtype.itemsize):
        try:
            return torch.empty(shape, dtype=dtype)
        except (RuntimeError, TypeError, OverflowError):  # of a size that no tensor can have
            raise DecodeError(f"no tensor has the shape {shape}") from None
    return torch.frombuffer(bytearray(memoryview(data)[start:]), dtype=dtype).reshape(shape)


def register() -> None:
    """Let tensors and parameters travel (entry point ``torch`` of the group ``taskmesh.wire_types``)."""
    codec.register(codec.WireType(CODE, Tensor, encode, decode))


def is_finite(values: Tensor) -> bool:
    """Whether all of a tensor's values are numbers.

    What is not finite shows in the sum; a sum may overflow too, and only then each value is looked at.
    """
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


class Slot(NamedTuple):
    """Where one tensor lies: ``offset`` and ``size`` count elements of its region."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    size: int


class FlatLayout(NamedTuple):
    """Names, shapes and offsets of a model's flat buffer.

    Attributes:
        parameters, floats, integers: the slots of the three regions, in the model's own order.
        digest: equal for two models exactly when their buffers mean the same.
    """

    parameters: tuple[Slot, ...]
    floats: tuple[Slot, ...]
    integers: tuple[Slot, ...]
    digest: str

    @classmethod
    def of(cls, model: nn.Module) -> FlatLayout:
        """Read a model's layout. A tensor that several names share (tied weights) is in it once.

        Raises:
            ConfigurationError: a parameter that is no real floating-point number of at most 32 bits.
        """
        parameters = _slots(model.named_parameters())
        for slot in parameters:
            if _DTYPES[slot.dtype] not in _FLAT_FLOATS:
                raise ConfigurationError(
                    f"parameter {slot.name!r} is {slot.dtype}; the flat buffer holds fp32"
                )
        kept = set(model.state_dict(keep_vars=True))
        buffers = [(name, buffer) for name, buffer in model.named_buffers() if name in kept]
        floats = _slots((name, buffer) for name, buffer in buffers if buffer.is_floating_point())
        integers = _slots((name, buffer) for name, buffer in buffers if not buffer.is_floating_point())
        # Not the dtype: half-precision workers and an fp32 master share one layout.
        names = [[(slot.name, slot.shape) for slot in region] for region in (parameters, floats, integers)]
        digest = hashlib.blake2b(repr(names).encode(), digest_size=16).hexdigest()
        return cls(parameters, floats, integers, digest)

    @property
    def parameter_count(self) -> int:
        """fp32 values that are trained."""
        return _end(self.parameters)

    @property
    def float_count(self) -> int:
        """fp32 values in all: parameters, then float buffers."""
        return self.parameter_count + _end(self.floats)

    @property
    def integer_count(self) -> int:
        """int64 values."""
        return _end(self.integers)

    @property
    def integers_at(self) -> int:
        """The byte at which the integer buffers begin."""
        return -(-4 * self.float_count // 8) * 8

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole buffer."""
        return self.integers_at + 8 * self.integer_count


def _slots(tensors: Iterable[tuple[str, Tensor]]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    offset = 0
    for name, tensor in tensors:
        slots.append(
            Slot(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), offset, tensor.numel())
        )
        offset += tensor.numel()
    return tuple(slots)


def _end(slots: tuple[Slot, ...]) -> int:
    return slots[-1].offset + slots[-1].size if slots else 0


class _Place(NamedTuple):
    """Where one parameter lies in the flat buffers, and whether it is a view of its place or is copied."""

    parameter: nn.Parameter
    values: Tensor
    gradient: Tensor
    is_view: bool


class FlatModel:
    """A model whose parameters and gradients lie in flat buffers.

    fp32 parameters on the CPU become views of the buffer, and their gradients views of ``gradient``: nothing is
    copied to flatten them. Others (half precision, other devices) are copied when they are read and written.

    Attributes:
        values: parameters, then float buffers; fp32, shape (float_count,).
        integers: integer buffers; int64.
        gradient: fp32, shape (parameter_count,).
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.layout = layout = FlatLayout.of(model)
        self._bytes = torch.zeros(layout.size_bytes, dtype=torch.uint8)
        self.values = self._bytes[: 4 * layout.float_count].view(torch.float32)
        self.integers = self._bytes[layout.integers_at :].view(torch.int64)
        self.gradient = torch.zeros(layout.parameter_count)
        self._places: list[_Place] = []
        parameters = dict(model.named_parameters())
        for slot in layout.parameters:
            parameter = parameters[slot.name]
            values = self._part(self.values, slot, 0)
            values.copy_(parameter.detach())
            is_view = parameter.dtype is torch.float32 and parameter.device.type == "cpu"
            if is_view:
                parameter.data = values
            self._places.append(_Place(parameter, values, self._part(self.gradient, slot, 0), is_view))
        self.collect_buffers()

    @property
    def floats(self) -> Tensor:
        """The float buffers' part of ``values``."""
        return self.values[self.layout.parameter_count :]

    def view(self) -> memoryview:
        """The whole buffer, as it changes; ``collect_buffers`` brings the buffers' part up to date."""
        return self._bytes.numpy().data

    def borrow(self, data: memoryview) -> None:
        """Let the parameters lie in somebody's buffer, whose bytes must stay; the model's own buffers are copied.

        ``values`` has no parameters then.

        Raises:
            CheckpointError: it has more or fewer bytes than the layout takes.
        """
        layout = self.layout
        self._check_size(data)
        if not layout.size_bytes:
            return
        found = torch.frombuffer(data, dtype=torch.uint8)
        values = found[: 4 * layout.float_count].view(torch.float32)
        self.floats.copy_(values[layout.parameter_count :])
        self.integers.copy_(found[layout.integers_at :].view(torch.int64))
        self._lie_in(values)

    def load(self, data: bytes | memoryview) -> None:
        """Take over a buffer's bytes.

        Raises:
            CheckpointError: they are more or fewer than the layout takes.
        """
        self._check_size(data)
        self.view()[:] = data
        self._lie_in(self.values)

    def _lie_in(self, values: Tensor) -> None:
        self._places = [
            place._replace(values=self._part(values, slot, 0))
            for place, slot in zip(self._places, self.layout.parameters, strict=True)
        ]
        for place in self._places:
            if place.is_view:
                place.parameter.data = place.values
        self.spread()

    def _check_size(self, data: bytes | memoryview) -> None:
        if len(data) != self.layout.size_bytes:
            raise CheckpointError(
                f"a version of {len(data)} bytes; this model's layout takes {self.layout.size_bytes}"
            )

    def spread(self) -> None:
        """Let the model have what the buffer holds."""
        with torch.no_grad():
            for place in self._places:
                if not place.is_view:
                    place.parameter.copy_(place.values)
        self.spread_buffers()

    def collect_parameters(self) -> None:
        """Read the parameters from the model, where it has them elsewhere."""
        with torch.no_grad():
            for place in self._places:
                if not place.is_view:
                    place.values.copy_(place.parameter)

    def spread_buffers(self) -> None:
        """Write the buffers into the model."""
        with torch.no_grad():
            for buffer, part in self._buffers():
                buffer.copy_(part)

    def collect_buffers(self) -> None:
        """Read the buffers from the model."""
        with torch.no_grad():
            for buffer, part in self._buffers():
                part.copy_(buffer)

    def use_gradient(self, gradient: Tensor) -> None:
        """Let the gradient lie in other memory from now on; fp32, shape (parameter_count,)."""
        self.gradient = gradient
        self._places = [
            place._replace(gradient=self._part(gradient, slot, 0))
            for place, slot in zip(self._places, self.layout.parameters, strict=True)
        ]
        self.spread_gradient()

    def zero_gradient(self) -> None:
        """Begin a gradient: backward then adds into the flat one."""
        self.gradient.zero_()
        self.spread_gradient()
        for place in self._places:
            if not place.is_view:
                place.parameter.grad = None

    def collect_gradient(self) -> Tensor:
        """The flat gradient after backward; a parameter that got none counts as zero."""
        for number in range(len(self._places)):
            self.collect_gradient_of(number)
        return self.gradient

    def collect_gradient_of(self, number: int) -> None:
        """See that one parameter's gradient lies in the flat one, by its place in the layout."""
        place = self._places[number]
        found = place.parameter.grad
        if found is not None and found.data_ptr() != place.gradient.data_ptr():
            place.gradient.copy_(found)

    def parameters(self) -> list[nn.Parameter]:
        """In the order of the layout."""
        return [place.parameter for place in self._places]

    def spread_gradient(self) -> None:
        """Point the ``grad`` of every trained parameter (fp32, on the CPU) at the flat one."""
        for place in self._places:
            if place.is_view:
                place.parameter.grad = place.gradient if place.parameter.requires_grad else None

    def _part(self, region: Tensor, slot: Slot, start: int) -> Tensor:
        return region[start + slot.offset : start + slot.offset + slot.size].view(slot.shape)

    def _buffers(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Buffers of the model and their places; looked up each time, since a module may put new ones in."""
        layout = self.layout
        if not layout.floats and not layout.integers:
            return
        buffers = dict(self.model.named_buffers())
        for slot in layout.floats:
            yield buffers[slot.name], self._part(self.values, slot, layout.parameter_count)
        for slot in layout.integers:
            yield buffers[slot.name], self._part(self.integers, slot, 0)
