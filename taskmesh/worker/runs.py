"""A handler that is under way."""

from __future__ import annotations

import asyncio
from typing import Any

from taskmesh.tasks import Context
from taskmesh.worker.deliveries import Delivery


class Run:
    """One handler that is under way and has suspended (or runs in a thread or a process).

    Attributes:
        started: monotonic seconds.
        in_process: it runs in a process, so it cannot block the event loop.
        task: whoever awaits it; cancelling that stops the handler, unless it runs in a thread.
        timer: of its timeout.
        reason: why it was stopped: "cancelled", "timeout" or "drain".
        ended: orders of deliveries that were ended early.
    """

    __slots__ = (
        "context",
        "deliveries",
        "ended",
        "in_process",
        "in_thread",
        "reason",
        "started",
        "task",
        "timer",
    )

    def __init__(
        self,
        deliveries: list[Delivery],
        started: float,
        context: Context | None,
        *,
        in_thread: bool = False,
        in_process: bool = False,
    ) -> None:
        self.deliveries = deliveries
        self.started = started
        self.context = context
        self.in_thread = in_thread
        self.in_process = in_process
        self.task: asyncio.Task[Any] | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.reason: str | None = None
        self.ended: set[int] = set()
