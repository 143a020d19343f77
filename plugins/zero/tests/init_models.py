"""A model whose constructors do what constructors do, and its training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from ds_testing.truth import train
from torch import Tensor, nn

D = 6


class Block(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)
        self.gain = nn.Parameter(torch.rand(D))
        self.register_buffer("seen", torch.rand(2))
        with torch.no_grad():
            self.gain.mul_(scale)  # after a child was finished, and of its own

    def forward(self, x: Tensor) -> Any:
        return torch.tanh(self.inner(x)) * self.gain


class LaterBlock(Block):
    """Its parent's constructor is not the end of its own."""

    def __init__(self) -> None:
        super().__init__(2.0)
        self.more = nn.Parameter(torch.randn(D) + self.gain.detach())
        nn.init.normal_(self.inner.weight, std=0.3)  # of a finished child

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) + self.more


class Everything(nn.Module):
    """Constructors in all the ways that people write them."""

    def __init__(self) -> None:
        super().__init__()

        class Local(nn.Linear):
            def __init__(self) -> None:
                super().__init__(D, D)
                self.shift = nn.Parameter(torch.randn(D))

            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) + self.shift

        self.blocks = nn.ModuleList([Block(), LaterBlock(), Local()])
        self.copies = nn.ModuleList([copy.deepcopy(self.blocks[0]) for _ in range(2)])
        self.by_name = nn.ModuleDict(
            {"norm": nn.BatchNorm1d(D), "conv": nn.Conv1d(1, 1, 3, padding=1)}
        )
        self.loose = nn.ParameterList([nn.Parameter(torch.randn(D, D)) for _ in range(2)])
        self.emb = nn.Linear(D, D, bias=False)
        self.head = nn.Linear(D, D, bias=False)
        self.head.weight = self.emb.weight
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.none = nn.Parameter(torch.empty(0, D))
        data = self.emb.weight.data  # a view that lives on while others are built
        self.late = nn.utils.parametrizations.weight_norm(nn.Linear(D, D))
        data.mul_(0.5)
        assert self.blocks[2].weight.shape == (D, D)
        assert sum(p.numel() for p in self.blocks[2].parameters()) == D * D + 2 * D
        self.blocks[0].inner.weight.data.add_(self.blocks[1].inner.weight.data.t())
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.apply(self.start)

    def start(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(0.0, 0.2)
        elif isinstance(module, Block):
            torch.nn.init.uniform_(module.inner.bias)  # a child's

    def forward(self, x: Tensor, step: int = 0) -> Any:
        for block in (*self.blocks, *self.copies):
            x = block(x) + x
        x = self.by_name["conv"](self.by_name["norm"](x).unsqueeze(1)).squeeze(1)
        return (
            self.head(self.late(self.frozen(self.emb(x) @ self.loose[step % 2]))) * self.scalar
            + self.none.sum()
        )


def config(stage: int = 3, dtype: str = "float32", **section: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": dtype == "bfloat16"},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage, "param_persistence_threshold": 8, **section},
    }


def inputs(step: int, rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(4, D, generator=torch.Generator().manual_seed(10 * step + rank)).to(dtype)


def losses_of(engine: Any, dtype: torch.dtype) -> list[float]:
    """Losses of this rank."""
    return train(engine, lambda step, rank: (inputs(step, rank, dtype), step), mean=False)
