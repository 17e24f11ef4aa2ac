"""What a shard's compression remembers from step to step, in the worker that holds the shard.

A state is named by the attempt whose payload led to it; it is the shard's only once that payload has entered a version.
So a gradient that is refused, computed twice or taken back changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from taskmesh.training.buckets import Bucket
from taskmesh.training.compression.base import Compression, Memory

State = tuple[Memory, ...]
FRESH = ""


class Memories:
    """The states of the shards that this process holds."""

    def __init__(self) -> None:
        self._states: dict[int, dict[str, State]] = {}

    def get(self, shard: int, name: str) -> State | None:
        """A state, by its name; None when it is not here (any more)."""
        return self._states.get(shard, {}).get(name)

    def keep(self, shard: int, before: str, name: str, state: State) -> None:
        """A new state, made from another; of all the others none can become the shard's any more."""
        known = self._states.get(shard, {})
        self._states[shard] = {each: known[each] for each in (before,) if each in known} | {name: state}


def fresh(compression: Compression, buckets: Sequence[Bucket]) -> State:
    """What is remembered before the first step."""
    return tuple(compression.memory(bucket) for bucket in buckets)


def copy(memory: Memory) -> Memory:
    """One bucket's memory again, to be changed."""
    return {name: values.copy() for name, values in memory.items()}
