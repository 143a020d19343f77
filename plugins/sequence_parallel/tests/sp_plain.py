"""A module of one's own with attention, for sequences that are divided, and the same as one writes
it without.
"""

from __future__ import annotations

from typing import Any

import torch
from ds_sequence_parallel import CrossEntropy, DistributedAttention, RingAttention
from ds_testing.kits.parallel.runner import MICRO
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

WIDTH = 12
HEADS = 3
KEYS = 1
LENGTH = 8
VOCABULARY = 11


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention; [batch, sequence, heads, size] each, with fewer heads of keys and values or
    as many.
    """
    times = query.shape[2] // key.shape[2]
    q, k, v = (
        x.transpose(1, 2) for x in (query, *(x.repeat_interleave(times, 2) for x in (key, value)))
    )
    return scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Plain(nn.Module):
    """One block, and the loss of the tokens that count."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)
        self.query = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.keys = nn.Linear(WIDTH, 2 * KEYS * WIDTH // HEADS)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.attention: Any = causal
        self.loss: Any = lambda logits, labels: cross_entropy(
            logits.flatten(0, 1), labels.flatten()
        )

    def forward(self, tokens: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        """The loss."""
        x = self.tokens(tokens) + self.places(positions)
        query = self.query(x).unflatten(-1, (HEADS, -1))
        key, value = self.keys(x).unflatten(-1, (2 * KEYS, -1)).chunk(2, 2)
        x = x + self.out(self.attend(query, key, value).flatten(2))
        loss: Tensor = self.loss(self.head(self.norm(x)), labels)
        return loss

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The attention."""
        found: Tensor = self.attention(query, key, value)
        return found


class Divided(Plain):
    """With Ulysses."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = DistributedAttention(causal)
        self.loss = CrossEntropy()


class Ring(Divided):
    """With ring attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = RingAttention()

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Heads come before the sequence."""
        found: Tensor = self.attention(*(x.transpose(1, 2) for x in (query, key, value)))
        return found.transpose(1, 2)


def whole() -> nn.Module:
    """One process."""
    return Plain()


def divided() -> nn.Module:
    """Ulysses."""
    return Divided()


def ring() -> nn.Module:
    """Ring."""
    return Ring()


def batch(step: int, micro: int, index: int) -> dict[str, Tensor]:
    """Labels count in the first shards only, but for some; equally many in each batch, as data
    parallelism wants it.
    """
    made = torch.Generator().manual_seed(100 * step + 10 * micro + index)
    tokens = torch.randint(0, VOCABULARY, (MICRO, LENGTH), generator=made)
    labels = tokens.roll(-1, 1)
    labels[:, 3:-1] = -100
    return {"tokens": tokens, "positions": torch.arange(LENGTH).expand(MICRO, -1), "labels": labels}
