"""A byte-level GPT whose embedding and head are one parameter, as an ordered Sequential."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Embedding(nn.Module):
    """Tokens and their positions: ``(batch, sequence)`` to ``(batch, sequence, width)``."""

    def __init__(self, vocabulary: int, width: int, context: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(vocabulary, width) * 0.02)
        self.position = nn.Parameter(torch.randn(context, width) * 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight) + self.position[: tokens.shape[1]]


class Block(nn.TransformerEncoderLayer):
    """Causal attention and a feed-forward network, normalised before each."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__(
            width, heads, 4 * width, dropout, "gelu", batch_first=True, norm_first=True
        )

    def forward(self, hidden: Tensor) -> Tensor:  # type: ignore[override]
        size = hidden.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(size, device=hidden.device)
        return super().forward(hidden, mask.to(hidden.dtype), is_causal=True)


def tied_gpt(
    *,
    vocabulary: int = 256,
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    context: int = 128,
    dropout: float = 0.0,
) -> nn.Sequential:
    """Returns the uncut model, from tokens ``(batch, sequence)`` to logits of the next token."""
    embedding = Embedding(vocabulary, width, context)
    head = nn.Linear(width, vocabulary, bias=False)
    head.weight = embedding.weight  # tied: one parameter, at both ends of the pipeline
    blocks = [Block(width, heads, dropout) for _ in range(layers)]
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(width), head)
