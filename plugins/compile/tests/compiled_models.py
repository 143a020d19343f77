"""A small transformer, its data, and one process of plain torch as the truth."""

from __future__ import annotations

from typing import Any

import torch
from ds_testing.truth import plain, start
from torch import Tensor, nn

D = 8
HEADS = 2
LENGTH = 6
MICRO = 2
STEPS = 3
SGD = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


class Block(nn.Module):
    """Attention and a feed-forward part; `index` differs per block, and nobody reads it."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm = nn.LayerNorm(D)
        self.qkv = nn.Linear(D, 3 * D)
        self.out = nn.Linear(D, D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for t in self.qkv(self.norm(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        hidden: Tensor = x + self.down(torch.tanh(self.up(x)))
        return hidden


class Model(nn.Module):
    """Blocks, and a head whose loss it returns."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)
        self.blocks = nn.ModuleList(Block(i) for i in range(blocks))
        self.head = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.head(x).square().mean()
        return loss


def model(blocks: int = 3) -> Model:
    torch.manual_seed(0)
    return Model(blocks).double()


def data(step: int, rank: int) -> Tensor:
    return torch.randn(
        MICRO,
        LENGTH,
        D,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(100 * step + rank),
    )


def engine_of(given: nn.Module, stage: int = 0, **config: Any) -> Any:
    zero = {"stage": stage, **({"param_persistence_threshold": 0} if stage == 3 else {})}
    return start(given, micro=MICRO, optimizer=SGD, **{"zero_optimization": zero, **config})


def truth(ranks: int) -> Model:
    """Plain torch on the data of all ranks."""
    wanted = model()
    plain(wanted, data, STEPS, count=ranks, optimizer=SGD)
    return wanted
