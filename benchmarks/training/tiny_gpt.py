"""A byte-level transformer, and the source text of Python's own standard library."""

from __future__ import annotations

import functools
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT = 64
WIDTH = 200  # with four layers, about two million parameters
HEADS = 4
LAYERS = 4
TEXT_BYTES = 4_000_000
HELD_OUT = 512  # sequences
EVALUATED = 64  # of those


class Block(nn.Module):
    """Attention over the bytes so far, then a perceptron; each adds to what it reads."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        mixed = self.mixed(self.before_attention(x)).view(rows, length, 3, HEADS, width // HEADS)
        query, key, value = mixed.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.joined(seen.transpose(1, 2).reshape(rows, length, width))
        out: Tensor = x + self.perceptron(self.before_perceptron(x))
        return out


class TinyGpt(nn.Module):
    """Logits of the next byte at every place; shapes (rows, length) and (rows, length, 256)."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        at = self.places.weight[: x.shape[1]]
        logits: Tensor = self.last(self.blocks(self.bytes(x) + at)) @ self.bytes.weight.T
        return logits


def loss(model: nn.Module, rows: Tensor) -> Tensor:
    """Cross-entropy of each next byte, unreduced; rows of shape (rows, CONTEXT + 1)."""
    logits = model(rows[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")


@functools.cache
def _sequences() -> Tensor:
    """The text in rows of CONTEXT + 1 bytes, each beginning with the last byte of the one before."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= TEXT_BYTES:
            break
    return torch.frombuffer(text[:TEXT_BYTES], dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)


class StandardLibrary:
    """Sequences to learn from: all but each eighth, as far as those are held out."""

    def __init__(self) -> None:
        kept = torch.ones(len(_sequences()), dtype=torch.bool)
        kept[: 8 * HELD_OUT : 8] = False
        self._rows = _sequences()[kept].contiguous()

    def __len__(self) -> int:
        return len(self._rows)

    def fetch(self, indices: Sequence[int]) -> Tensor:
        return self._rows[list(indices)].long()


def validate(model: nn.Module) -> float:
    """Mean loss on sequences that are held out."""
    with torch.no_grad():
        return float(loss(model, _sequences()[: 8 * EVALUATED : 8].long()).mean())
