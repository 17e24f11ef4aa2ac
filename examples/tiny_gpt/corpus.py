"""The text: every .py file of the running interpreter's standard library, in a fixed order.

Master and workers must run the same Python release, since a sample goes by its index alone. A run refuses workers
whose data has another length.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

LEFT_OUT = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT_EVERY = (
    20  # of so many files one is for validation: whole files, so that nothing of them is ever trained on
)


def source_files() -> list[Path]:
    """The files, in an order that does not depend on the file system."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(sysconfig.get_path("stdlib")):
        subfolders[:] = sorted(set(subfolders) - LEFT_OUT)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


@functools.cache
def text(part: str) -> Tensor:
    """The bytes of "training" or "validation"; uint8, read once a process."""
    chosen = [
        file for place, file in enumerate(source_files()) if (part == "validation") == _is_held_out(place)
    ]
    if not chosen:
        raise RuntimeError(
            f"no source files in {sysconfig.get_path('stdlib')}: this Python has none to learn from"
        )
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in chosen)), dtype=torch.uint8)


def _is_held_out(place: int) -> bool:
    return place % HELD_OUT_EVERY == HELD_OUT_EVERY - 1


class Windows:
    """The training text as samples of ``block`` bytes and the one that follows, side by side."""

    def __init__(self, block: int) -> None:
        self.block = block
        self._text = text("training")

    def __len__(self) -> int:
        return (len(self._text) - 1) // self.block

    def fetch(self, indices: Sequence[int]) -> Tensor:
        """int64, shape (samples, block + 1)."""
        starts = torch.tensor(indices)[:, None] * self.block
        return self._text[starts + torch.arange(self.block + 1)].long()


def validation_rows(block: int, rows: int) -> Tensor:
    """Samples spread evenly over the validation text; int64, shape (rows, block + 1)."""
    held_out = text("validation")
    starts = torch.linspace(0, len(held_out) - block - 1, rows).long()[:, None]
    return held_out[starts + torch.arange(block + 1)].long()
