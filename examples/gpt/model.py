"""A small GPT over bytes: pre-norm blocks, causal attention, tied input and output embedding."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # every byte


class Block(nn.Module):
    """Attention, then a feed-forward layer, each added to its input. (batch, time, width) -> the
    same.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, w = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, t, 3, self.heads, w // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(b, t, w))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """forward(x, y) is the mean cross-entropy of the next byte; logits(x) is what it would say."""

    def __init__(
        self, context: int = 64, width: int = 128, layers: int = 3, heads: int = 4
    ) -> None:
        super().__init__()
        self.context = context
        self.embed = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def logits(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(x).flatten(0, 1).float(), y.flatten())

    @torch.no_grad()
    def write(self, prompt: bytes, length: int, temperature: float = 0.7) -> str:
        """Continue `prompt` by `length` bytes."""
        text = torch.tensor([list(prompt)], device=self.embed.weight.device)
        for _ in range(length):
            odds = self.logits(text[:, -self.context :])[:, -1].float() / temperature
            text = torch.cat([text, torch.multinomial(odds.softmax(-1), 1)], 1)
        return bytes(text[0].tolist()).decode("utf-8", "replace")
