"""What decides the bits of a gradient beside the run itself: two processes that agree on it compute the same."""

from __future__ import annotations

import numpy as np
import torch


def fingerprint(threads: int, ranks: int = 1) -> str:
    """This process's torch build, processor and settings, in words.

    Args:
        ranks: how many processes compute a shard together.
    """
    parts = [
        f"torch {torch.__version__}",
        f"numpy {np.__version__}",
        f"cpu {torch.backends.cpu.get_cpu_capability()}",
        f"torch threads {threads}",
    ]
    if ranks > 1:
        parts.append(f"groups of {ranks} ranks")
    if torch.are_deterministic_algorithms_enabled():
        parts.append("deterministic algorithms")
    if torch.get_float32_matmul_precision() != "highest":
        parts.append(f"matmul precision {torch.get_float32_matmul_precision()}")
    return ", ".join(parts)
