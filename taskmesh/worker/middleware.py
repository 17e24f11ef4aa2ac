"""The onion around every handler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from taskmesh.tasks import Call, Middleware, Next


def compose(middlewares: Sequence[Middleware], innermost: Next) -> Next:
    """Wrap ``innermost`` so that the first middleware is outermost.

    A middleware is ``async def m(call, call_next)``: it may change the call, await ``call_next(call)``, and
    return or raise what it likes; what comes out of the outermost is the task's outcome.
    """
    composed = innermost
    for middleware in reversed(middlewares):
        composed = _wrap(middleware, composed)
    return composed


def _wrap(middleware: Middleware, call_next: Next) -> Next:
    async def wrapped(call: Call) -> Any:
        return await middleware(call, call_next)

    return wrapped
