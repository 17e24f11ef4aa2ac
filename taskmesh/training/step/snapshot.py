"""A run's state at one instant, copied aside so that the run can go on while it is written; and back from its parts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from taskmesh.checkpoints.tables import TYPES, Entry, Index, decode_index, encode_index
from taskmesh.codec import pack_value, unpack_value
from taskmesh.errors import CheckpointError, ConfigurationError, DecodeError
from taskmesh.tensors import FlatLayout, FlatModel


class Memory:
    """Where snapshots lie: memory that is used again, since to touch fresh memory costs more than to fill it."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, size_bytes: int) -> Tensor:
        """So many bytes, with anything in them; what was there under that name before is gone."""
        held = self._held.get(name)
        if held is None or len(held) != size_bytes:
            held = self._held[name] = torch.empty(size_bytes, dtype=torch.uint8)
        return held


class Snapshot(NamedTuple):
    """The parts of a checkpoint (``taskmesh.checkpoints.tables``), in memory that nobody else writes to.

    Attributes:
        seconds: that it took.
    """

    parts: dict[str, memoryview]
    seconds: float


class _Found(NamedTuple):
    """A tensor in a state, and the keys that lead to it."""

    path: tuple[str | int, ...]
    tensor: Tensor
    is_array: bool


def take_snapshot(flat: FlatModel, state: Mapping[str, Any], memory: Memory) -> Snapshot:
    """Copy the parameters and a state aside: plain values, containers, tensors and arrays.

    Raises:
        ConfigurationError: the state holds something that cannot be saved.
    """
    began = time.perf_counter()
    found: list[_Found] = []
    try:
        rest = pack_value(_without_tensors(state, (), found))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigurationError(f"the optimizer's or schedule's state cannot be saved: {error}") from None
    entries, size_bytes = _place(found)
    tensors = memory.take("tensors", size_bytes)
    for entry, (_, tensor, _) in zip(entries, found, strict=True):
        _view(tensors, entry).copy_(tensor)
    parameters = memory.take("parameters", flat.layout.size_bytes)
    if len(parameters):
        parameters.copy_(torch.frombuffer(flat.view(), dtype=torch.uint8))
    index = encode_index(Index(entries_of(flat.layout), entries))
    parts = {
        "parameters": parameters.numpy().data,
        "tensors": tensors.numpy().data,
        "state": memoryview(rest),
        "index": memoryview(index),
    }
    return Snapshot(parts, time.perf_counter() - began)


def read_state(parts: Mapping[str, memoryview]) -> dict[str, Any]:
    """The state of a checkpoint, its tensors in memory of their own.

    Raises:
        CheckpointError: the parts do not hold one.
    """
    try:
        state = unpack_value(bytes(parts["state"]))
    except DecodeError as error:
        raise CheckpointError(f"a checkpoint's state is damaged: {error}") from None
    if not isinstance(state, dict):
        raise CheckpointError("a checkpoint's state is damaged: it is no map")
    if "index" in parts:  # an older release kept the tensors in the state
        index = decode_index(parts["index"], len(parts["parameters"]), len(parts["tensors"]))
        for entry in index.tensors:
            _put(state, entry, _read(parts["tensors"], entry))
    return state


def entries_of(layout: FlatLayout) -> tuple[Entry, ...]:
    """A flat buffer's tensors."""
    floats_at = 4 * layout.parameter_count
    return (
        *(Entry((slot.name,), "float32", slot.shape, 4 * slot.offset) for slot in layout.parameters),
        *(Entry((slot.name,), "float32", slot.shape, floats_at + 4 * slot.offset) for slot in layout.floats),
        *(
            Entry((slot.name,), "int64", slot.shape, layout.integers_at + 8 * slot.offset)
            for slot in layout.integers
        ),
    )


def _without_tensors(value: Any, path: tuple[str | int, ...], found: list[_Found]) -> Any:
    """A copy of a state's containers with nothing where a tensor was."""
    if isinstance(value, (Tensor, np.ndarray)):
        found.append(_describe(value, path))
        return None
    if isinstance(value, Mapping):
        return {key: _without_tensors(each, (*path, key), found) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_tensors(each, (*path, place), found) for place, each in enumerate(value)]
    return value


def _describe(value: Tensor | np.ndarray[Any, Any], path: tuple[Any, ...]) -> _Found:
    tensor = value.detach() if isinstance(value, Tensor) else torch.from_numpy(np.ascontiguousarray(value))
    if _name(tensor.dtype) not in TYPES or tensor.layout is not torch.strided:
        raise TypeError(f"{path} is a tensor of dtype {tensor.dtype} and layout {tensor.layout}")
    if not all(type(key) in (str, int) for key in path):
        raise TypeError(f"the keys {path} are not all texts or numbers")
    return _Found(path, tensor, not isinstance(value, Tensor))


def _place(found: list[_Found]) -> tuple[tuple[Entry, ...], int]:
    """Put the tensors in order, the largest types first, so that each lies where its type wants it without a gap."""
    found.sort(key=lambda each: -TYPES[_name(each.tensor.dtype)].size_bytes)
    entries: list[Entry] = []
    at = 0
    for path, tensor, is_array in found:
        entries.append(Entry(path, _name(tensor.dtype), tuple(tensor.shape), at, is_array))
        at += entries[-1].size_bytes
    return tuple(entries), at


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _view(memory: Tensor, entry: Entry) -> Tensor:
    """A tensor's place in the memory."""
    part = memory[entry.at : entry.at + entry.size_bytes]
    return part.view(getattr(torch, entry.dtype)).view(entry.shape)


def _read(tensors: memoryview, entry: Entry) -> Tensor | np.ndarray[Any, Any]:
    dtype = getattr(torch, entry.dtype)
    if not entry.count:
        tensor = torch.empty(entry.shape, dtype=dtype)
    else:
        flat = torch.frombuffer(tensors, dtype=dtype, count=entry.count, offset=entry.at)
        tensor = flat.reshape(entry.shape).clone()
    return tensor.numpy() if entry.array else tensor


def _put(state: dict[str, Any], entry: Entry, tensor: Any) -> None:
    """Put a tensor back where it was."""
    value: Any = state
    *way, last = entry.path
    try:
        for key in way:
            value = value[key]
        value[last] = tensor
    except (KeyError, IndexError, TypeError):
        raise CheckpointError(
            f"a checkpoint's state is damaged: it has no place for {entry.name!r}"
        ) from None
