"""A small model with frozen and small weights, its engine, and what is unsharded in it."""

from __future__ import annotations

from typing import Any

import torch
from ds_testing.truth import start
from torch import Tensor, nn

D = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(D, D)
        self.b = nn.Sequential(nn.Linear(D, D), nn.Tanh())
        self.frozen = nn.Linear(D, D).requires_grad_(False)
        self.small = nn.Parameter(torch.ones(2))
        self.norm = nn.BatchNorm1d(D)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.frozen(self.b(torch.tanh(self.a(x))))) * self.small.sum()


def gathered_engine(
    stage: int,
    dtype: str = "float32",
    model: nn.Module | None = None,
    optimizer: str = "SGD",
    **section: Any,
) -> Any:
    torch.manual_seed(0)
    disk = section.pop("disk", None)
    elsewhere = {"disk": {"path": disk}, "plugins": {"load": [f"disk={DISK}"]}} if disk else {}
    return start(
        Net() if model is None else model,
        micro=4,
        optimizer={"type": optimizer, "params": {"lr": 0.1}},
        bf16={"enabled": dtype == "bfloat16"},
        zero_optimization={"stage": stage, "param_persistence_threshold": 3, **section},
        **elsewhere,
    )


def step(engine: Any, seed: int = 0) -> None:
    from ds_core import comm

    x = torch.randn(4, D, generator=torch.Generator().manual_seed(10 * seed + comm.rank()))
    engine.backward(engine(x.to(next(engine.module.parameters()).dtype)).float().square().mean())
    engine.step()


def weights(engine: Any) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found


def unused_are_sharded(engine: Any) -> None:
    """Nothing is gathered or kept."""
    for unit in getattr(engine.partitioner, "units", ()):
        assert not unit.is_unsharded and not unit.uses, unit.bucket.names
    if engine.partitioner.section.stage == 3:
        assert engine.partitioner.gathering.live == 0


DISK = "plugins.zero.tests.disk_store"
