"""A model written with dscore-tensor-parallel's layers, whose lengths do not divide evenly."""

from __future__ import annotations

import torch
from ds_tensor_parallel import (
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    parallel_cross_entropy,
)
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 13
LENGTH = 6
HEADS = 5
SIZE = 2
INNER = 11
HIDDEN = HEADS * SIZE


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = ColumnParallelLinear(HIDDEN, 3 * HIDDEN, segments=(HIDDEN,) * 3, unit=SIZE)
        self.out = RowParallelLinear(HIDDEN, HIDDEN, unit=SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return out


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = ColumnParallelLinear(HIDDEN, INNER)
        self.down = RowParallelLinear(INNER, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(functional.gelu(self.up(x)))
        return out


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.attention = Attention()
        self.mlp = Inner()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class Written(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = VocabParallelEmbedding(VOCABULARY, HIDDEN)
        self.places = HiddenParallelEmbedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.mix = ColumnParallelLinear(HIDDEN, HIDDEN, gather_output=True, segments=(4, 6))
        self.mixed = RowParallelLinear(HIDDEN, HIDDEN, split_input=True, segments=(7, 3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = ColumnParallelLinear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.norm(self.mixed(self.mix(x).tanh()))
        return parallel_cross_entropy(self.head(x)[:, :-1], ids[:, 1:], self.head)


def model() -> nn.Module:
    made = Written()
    for param in made.parameters():
        if param.dim() == 1:  # zeros and ones would hide mistakes
            nn.init.normal_(param, std=0.5)
    return made


def batch(step: int, micro: int, index: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + 10 * micro + index)
    return torch.randint(VOCABULARY, (2, LENGTH), generator=generator)
