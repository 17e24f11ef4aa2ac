"""What the driver tells an adapter, through the environment variables. Standard library only."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The driver imports `ours` for its `pending`, with none of this set: a URL that parses and at which nobody answers.
URL: str = os.environ.get("BENCH_URL", "redis://127.0.0.1:1/0")
VARIANT: str = os.environ.get("BENCH_VARIANT", "")  # the peer's pool or broker class, where it has several
RESULTS: bool = os.environ.get("BENCH_RESULTS") == "1"
CONCURRENCY: int = int(os.environ.get("BENCH_CONCURRENCY", "100"))

RESULT_TTL = 600  # seconds that results are kept, where the peer lets one choose
PREFETCH = 100


def script(name: str) -> str:
    """The path of a command that was installed beside this interpreter."""
    return str(Path(sys.executable).with_name(name))
