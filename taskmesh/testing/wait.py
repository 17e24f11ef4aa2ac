"""Waiting for conditions, not for time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

POLL = 0.005


async def wait_until(
    condition: Callable[[], object] | Callable[[], Awaitable[object]], timeout: float = 10.0, what: str = ""
) -> None:
    """Return as soon as ``condition`` (plain or async) is true.

    Raises:
        AssertionError: it did not come true within ``timeout`` seconds; the message says ``what``.
    """
    give_up_at = time.monotonic() + timeout
    while True:
        value = condition()
        if inspect.isawaitable(value):
            value = await value
        if value:
            return
        if time.monotonic() > give_up_at:
            raise AssertionError(f"not true within {timeout:g} s: {what or condition}")
        await asyncio.sleep(POLL)
