"""Random seeds by what they are for: the same name gives the same numbers, wherever and whenever it is computed."""

from __future__ import annotations

import hashlib


def derive(*names: str | int, bits: int = 128) -> int:
    """A seed of so many bits from a name such as ``(seed, "shard", step, shard)``."""
    return int.from_bytes(hashlib.blake2b(repr(names).encode(), digest_size=bits // 8).digest(), "little")
