"""Random numbers from a key: the same ones wherever they are drawn.

They are Philox's, counted from the key (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011).
"""

from __future__ import annotations

import numpy as np

from taskmesh.training.compression.base import Values


def uniform(key: int, count: int) -> Values:
    """``count`` values in (0, 1), 16 random bits each: the middles of 65,536 equal steps."""
    words = np.random.Philox(key=key).random_raw(-(-count // 4))
    draws = words.astype("<u8", copy=False).view("<u2")[:count].astype(np.float32)
    draws += np.float32(0.5)
    draws *= np.float32(1 / 65_536)
    return draws
