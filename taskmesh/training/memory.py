"""What a shard's compression remembers from step to step, in the worker that holds the shard.

A state is named by the attempt whose payload led to it; it is the shard's only once that payload has entered a version.
So a gradient that is refused, computed twice or taken back changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from taskmesh.errors import CheckpointError, TrainingError
from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression, Memory, Values

State = tuple[Memory, ...]
Held = State | memoryview  # as it is, or packed
RECENT = 10  # versions


class MemoryGone(TrainingError):
    """What the compression of shards remembered is nowhere any more: the run has to go on from a checkpoint.

    Args:
        holder: the worker that had it; "" where it was a checkpoint's.
        reason: why a checkpoint does not have it.
    """

    def __init__(self, holder: str, shards: Sequence[int], reason: str = "") -> None:
        detail = f" ({reason})" if reason else ""
        why = f"worker {holder} had it{detail}" if holder else reason
        super().__init__(f"what the compression of shards {list(shards)} remembered is lost: {why}")


class Memories:
    """The states of the shards that this process holds."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, State]] = {}
        self._used: dict[int, int] = {}

    def get(self, shard: int, name: str) -> State | None:
        """A state, by its name; None when it is not here (any more)."""
        return self._states.get(shard, {}).get(name)

    def keep(self, shard: int, before: str, name: str, state: State) -> None:
        """A new state, made from another; of all the others none can become the shard's any more."""
        known = self._states.get(shard, {})
        self._states[shard] = {each: known[each] for each in (before,) if each in known} | {name: state}

    def note_use(self, shard: int, version: int) -> None:
        """A shard was computed here, from that version; what was not for long is held elsewhere by now."""
        if version < max(self._used.values(), default=0) - RECENT:
            self._used.clear()  # the run was deleted, and began anew
        self._used[shard] = version
        for other in [each for each, used in self._used.items() if used < version - RECENT]:
            del self._used[other]
            self._states.pop(other, None)

    def in_use(self) -> list[tuple[int, str, State]]:
        """The states of shards that were computed here lately: the others are held elsewhere by now."""
        oldest = max(self._used.values(), default=0) - RECENT
        return [
            (shard, name, state)
            for shard, states in self._states.items()
            if self._used.get(shard, oldest) >= oldest
            for name, state in states.items()
        ]


def fresh(compression: Compression, buckets: Sequence[Bucket]) -> State:
    """What is remembered before the first step."""
    return tuple(compression.memory(bucket) for bucket in buckets)


def copy(memory: Memory) -> Memory:
    """One bucket's memory again, to be changed."""
    return {name: values.copy() for name, values in memory.items()}


def size_of(state: State) -> int:
    """Its bytes; 0 where nothing is remembered."""
    return sum(values.nbytes for values in _arrays(state))


def pack(state: State) -> memoryview:
    """A state as bytes: its arrays, bucket after bucket, as little-endian fp32."""
    arrays = list(_arrays(state))
    return np.concatenate(arrays).astype("<f4", copy=False).data.cast("B") if arrays else memoryview(b"")


def unpack(data: memoryview, like: State) -> State:
    """A state from its bytes.

    Args:
        like: a state of the same compression and buckets.

    Raises:
        CheckpointError: the bytes are those of another compression or model.
    """
    if len(data) != size_of(like):
        raise CheckpointError(
            f"what a compression remembers has {len(data)} bytes; this side expects {size_of(like)}"
        )
    values = np.frombuffer(data, "<f4").astype(np.float32)
    at = 0
    state: list[Memory] = []
    for memory in like:
        found: Memory = {}
        for name, array in memory.items():
            found[name] = values[at : at + array.size].reshape(array.shape)
            at += array.size
        state.append(found)
    return tuple(state)


def packed(held: Held) -> memoryview:
    """A state as bytes, whichever it is."""
    return held if isinstance(held, memoryview) else pack(held)


def _arrays(state: State) -> Iterator[Values]:
    return (values.ravel() for memory in state for values in memory.values())
