"""What is measured: the runs that the model is fitted on, and those that it is held against."""

from __future__ import annotations

import msgspec


class Setting(msgspec.Struct, frozen=True):
    """One run on this machine.

    Attributes:
        compute_s: what a worker waits for each shard, in the place of computing it; 0 where it really computes.
        rows: samples of a shard.
    """

    parameters: int
    workers: int
    shards: int
    compression: str = "none"
    compute_s: float = 0.0
    rows: int = 1

    @property
    def dense_bytes(self) -> int:
        return 4 * self.parameters

    @property
    def rounds(self) -> int:
        """Shards that the worker with most of them computes."""
        return -(-self.shards // self.workers)


class Scale(msgspec.Struct, frozen=True):
    """How much is measured; ``--quick`` makes it small."""

    fitted: tuple[Setting, ...]
    held_out: tuple[Setting, ...]
    steps: int = 24
    part_bytes: int = 32 * 1024 * 1024
    rounds: int = 12


FULL = Scale(
    fitted=(
        Setting(2_000, 1, 1),
        Setting(2_000, 1, 24),
        Setting(2_000, 2, 24),
        Setting(2_000, 3, 48),
        Setting(1_000_000, 1, 1, compute_s=0.03),
        Setting(1_000_000, 3, 3, compute_s=0.03),
        Setting(1_000_000, 2, 8, compute_s=0.03),
        Setting(8_000_000, 1, 1, compute_s=0.1),
        Setting(8_000_000, 2, 2, compute_s=0.1),
        Setting(8_000_000, 3, 3, compute_s=0.1),
        Setting(8_000_000, 1, 4),
        Setting(8_000_000, 2, 2),
        Setting(8_000_000, 3, 6, "int8", 0.03),
        Setting(8_000_000, 2, 2, "int8", 0.1),
        Setting(8_000_000, 1, 2, "topk_1%", 0.03),
        Setting(8_000_000, 3, 3, "topk_1%", 0.1),
    ),
    held_out=(
        Setting(6_000_000, 2, 2, compute_s=0.08),
        Setting(3_000_000, 3, 6, "int8", 0.05),
        Setting(3_000_000, 4, 4, compute_s=0.05),
        Setting(10_000_000, 1, 3, "topk_1%", 0.04),
        Setting(14_000_000, 3, 3, compute_s=0.12),
        Setting(10_000_000, 2, 2, rows=32),
    ),
)
QUICK = Scale(
    fitted=(
        Setting(2_000, 1, 1),
        Setting(2_000, 1, 8),
        Setting(400_000, 1, 2, compute_s=0.01),
        Setting(400_000, 2, 2, "int8", 0.01),
    ),
    held_out=(Setting(200_000, 2, 2, compute_s=0.01),),
    steps=6,
    part_bytes=2 * 1024 * 1024,
    rounds=3,
)
