"""A small character-level transformer: pre-norm blocks, causal attention, dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Block(nn.Module):
    """(batch, time, width) -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.projection = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        parts = self.query_key_value(self.norm_attention(x)).view(batch, time, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + F.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, time, width)), self.dropout, self.training)
        return x + self.feed(self.norm_feed(x))


class Transformer(nn.Module):
    """Tokens (batch, time) -> logits (batch, time, vocabulary); ``time`` is at most ``context``."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, context: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.apply(_initialise)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    @torch.no_grad()
    def continue_text(self, tokens: Tensor, count: int, generator: torch.Generator) -> Tensor:
        """``tokens`` (1, time) with ``count`` sampled ones appended."""
        for _ in range(count):
            logits = self(tokens[:, -self.context :])[:, -1]
            following = torch.multinomial(F.softmax(logits, dim=-1), 1, generator=generator)
            tokens = torch.cat([tokens, following], dim=1)
        return tokens


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
