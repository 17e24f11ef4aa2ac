"""The one thread of a process in which models run.

Forward passes draw from torch's global generator (dropout), so two of them at once would take each other's numbers
and no seed would give the same bits. One shard at a time keeps them apart, and keeps the event loop free; a machine
with many cores runs as many worker processes.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@functools.cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="taskmesh compute")


def enqueue(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[R]:
    """Have a function run in the process's compute thread, before all that is given to it later."""
    return asyncio.get_running_loop().run_in_executor(_thread(), functools.partial(function, *args, **kwargs))


async def compute(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run a function in the process's compute thread."""
    return await enqueue(function, *args, **kwargs)


def use_threads(count: int) -> None:
    """Set torch's intra-op threads, of the whole process; sums depend on how they are split over threads."""
    if torch.get_num_threads() != count:
        torch.set_num_threads(count)
