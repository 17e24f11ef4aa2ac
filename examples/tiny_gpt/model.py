"""A byte-level transformer: plain torch, nothing of taskmesh.

Pre-norm blocks, learnt positions, the output layer tied to the byte embedding (Radford et al., "Language Models are
Unsupervised Multitask Learners", 2019).
"""

from __future__ import annotations

import functools
import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTES = 256


class Block(nn.Module):
    """Attention to what came before, then a feed-forward layer; shape (rows, length, width)."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.attention_out = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        projected = self.queries_keys_values(self.attention_norm(x))
        split = projected.view(rows, length, 3, self.heads, width // self.heads)
        queries, keys, values = split.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        x = x + self.attention_out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + cast(Tensor, self.feed_forward(x))


class TinyGPT(nn.Module):
    """Predicts the next byte from up to ``block`` bytes before it."""

    def __init__(self, *, layers: int, width: int, heads: int, block: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.block = block
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.apply(functools.partial(_initialise, std=0.6 / math.sqrt(width)))

    def logits(self, text: Tensor) -> Tensor:
        """Of what follows each byte; from int64 (rows, length) to (rows, length, 256)."""
        positions = torch.arange(text.shape[1], device=text.device)
        x = self.dropout(self.embedding(text) + self.positions(positions))
        return functional.linear(self.norm(self.blocks(x)), self.embedding.weight)

    def forward(self, text: Tensor) -> Tensor:
        """The loss of each byte but the first, in nats; from (rows, length) to (rows, length - 1).

        Losses rather than logits, which are 256 times as large to send where workers validate.
        """
        logits = self.logits(text[:, :-1])
        return functional.cross_entropy(logits.transpose(1, 2), text[:, 1:], reduction="none")


def _initialise(module: nn.Module, std: float) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=std)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


@torch.no_grad()
def generate(model: TinyGPT, prompt: str, length: int, *, temperature: float = 0.8, seed: int = 0) -> str:
    """Go on from a prompt for ``length`` bytes, drawn one by one."""
    generator = torch.Generator().manual_seed(seed)
    written = torch.tensor([list(prompt.encode())])
    for _ in range(length):
        logits = model.logits(written[:, -model.block :])[:, -1] / temperature
        drawn = torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
        written = torch.cat([written, drawn], dim=1)
    return bytes(written[0].tolist()).decode(errors="replace")
