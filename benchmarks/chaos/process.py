"""What every process of the run does first."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def begin() -> None:
    """Log to stderr, and end with the driver, whatever ends that one (Linux)."""
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format=f"%(asctime)s.%(msecs)03d {os.getpid()} %(name)s %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
    )
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
