"""Patience with a server that is full: others make room, by and by, and a run of days need not end for it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from taskmesh.errors import BrokerFull

R = TypeVar("R")
log = logging.getLogger("taskmesh.training")
FIRST_PAUSE = 0.25
LONGEST_PAUSE = 10.0
TRIES = 36  # some five minutes


async def when_there_is_room(attempt: Callable[[], Awaitable[R]], who: str) -> R:
    """Do what may be done twice; again, after a pause, while the server has no room for it.

    Raises:
        BrokerFull: it has none after all the tries.
    """
    pause = FIRST_PAUSE
    for _ in range(TRIES - 1):
        try:
            return await attempt()
        except BrokerFull as error:
            log.warning("%s: no room: %s; trying again in %.2g s", who, error, pause)
        await asyncio.sleep(pause)
        pause = min(LONGEST_PAUSE, 2 * pause)
    return await attempt()
