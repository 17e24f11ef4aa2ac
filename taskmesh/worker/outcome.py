"""How a run ends: pure decisions, and exceptions as they travel."""

from __future__ import annotations

import traceback
from types import TracebackType
from typing import NamedTuple

from taskmesh.codec import pack_value
from taskmesh.errors import InvalidArguments, PayloadTooLarge
from taskmesh.messages import Failure
from taskmesh.tasks import Retry, RetryLater, type_name
from taskmesh.worker.redact import Redact, redact_arguments

MAX_TRACEBACK_CHARACTERS = 16_000
NEVER_RETRIED = (InvalidArguments, PayloadTooLarge)


class Verdict(NamedTuple):
    """What becomes of a failed try; ``delay`` is None when it was the last."""

    delay: float | None
    reason: str


def judge(error: BaseException, attempt: int, retry: Retry, draw: float) -> Verdict:
    """Decide whether a failed try is followed by another.

    Args:
        attempt: the try that failed, from 1.
        draw: uniform in [0, 1), for the jitter.
    """
    if isinstance(error, NEVER_RETRIED):
        return Verdict(None, "the call itself is wrong")
    asked = isinstance(error, RetryLater)
    if not asked and not isinstance(error, retry.on):
        return Verdict(None, f"failed: {type(error).__name__} is not retried")
    if attempt >= retry.attempts:
        return Verdict(None, f"failed: attempt {attempt} of {retry.attempts}")
    pause = retry.pause_after(attempt, draw)
    if isinstance(error, RetryLater) and error.delay is not None:
        pause = error.delay
    return Verdict(max(0.0, pause), f"attempt {attempt} of {retry.attempts} failed")


def failure_of(error: BaseException, engine_frames: tuple[str, ...], redact: Redact | None = None) -> Failure:
    """An exception as it travels; frames of the files named are left out of its traceback.

    Args:
        redact: takes out of every text what is nobody's business.
    """
    text = "".join(
        traceback.format_exception(type(error), error, _without(error.__traceback__, engine_frames))
    )
    message = _message(error)
    if redact is not None:  # before the text is cut: half a secret would not be found
        text, message = redact(text), redact(message)
    if len(text) > MAX_TRACEBACK_CHARACTERS:
        half = MAX_TRACEBACK_CHARACTERS // 2
        text = f"{text[:half]}\n... {len(text) - 2 * half} characters left out ...\n{text[-half:]}"
    try:
        args = tuple(error.args)
        pack_value(args)
        if redact is not None:
            args = redact_arguments(args, redact)
    except Exception:
        args = ()
    return Failure(type_name(type(error)), _as_utf8(message), _as_utf8(text), args)


def _message(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text cannot be formed)"


def _as_utf8(text: str) -> str:
    """Text that can travel: lone surrogates (of a file name that is not UTF-8, say) are escaped."""
    return text.encode("utf-8", "backslashreplace").decode()


def _without(tb: TracebackType | None, files: tuple[str, ...]) -> TracebackType | None:
    while tb is not None and tb.tb_frame.f_code.co_filename in files and tb.tb_next is not None:
        tb = tb.tb_next
    return tb
