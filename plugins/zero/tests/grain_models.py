"""A model for optimizers that need full tensors, and its training under any stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from ds_testing.truth import start
from torch import Tensor, nn

SMALL = {"reduce_bucket_size": 150, "param_persistence_threshold": 15, "prefetch_bucket_size": 100}
PLUGIN = "whole_tensors=plugins.zero.tests.whole_tensors"
LOAD = {"plugins": {"load": [PLUGIN]}}
GLOBAL = 4  # micro-batches per step over all ranks, at any world size
DTYPES = {"float64": 1e-12, "float32": 1e-6, "bfloat16": 1e-2, "float16": 1e-3}


class Net(nn.Module):
    """Uneven shapes, a shared, a frozen, an unused, an empty and a dimensionless parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, 13)
        self.mid = nn.Linear(13, 13)
        self.again = nn.Linear(13, 13, bias=False)
        self.again.weight = self.mid.weight
        self.frozen = nn.Linear(13, 11).requires_grad_(False)
        self.conv = nn.Conv1d(1, 3, 2)
        self.out = nn.Linear(30, 5, bias=False)
        self.unused = nn.Linear(3, 5)
        self.empty = nn.Parameter(torch.ones(0, 4))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.mid(torch.tanh(self.inp(x)))) * self.scale
        h = torch.tanh(self.frozen(torch.tanh(self.again(h))))
        h = self.conv(h[:, None]).flatten(1)
        return (
            (self.out(h) + self.empty.sum()).float().square().mean()
            if h.dtype != torch.float64
            else self.loss(h)
        )

    def loss(self, h: Tensor) -> Tensor:
        return (self.out(h) + self.empty.sum()).square().mean()


def lamb(groups: Any) -> torch.optim.Optimizer:
    from plugins.zero.tests.whole_tensors import PaperLamb

    return PaperLamb(groups, lr=0.02)


def muon(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups, lr=0.02)


MAKERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"lamb": lamb, "muon": muon}


def net(dtype: str, seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().to(torch.float64 if dtype == "float64" else torch.float32)


def groups_of(model: Net, kind: str) -> list[dict[str, Any]]:
    """Two groups with their own learning rates; Muon takes matrices only, and leaves the rest as it
    is.
    """
    wanted = [p for p in model.parameters() if kind != "muon" or (p.dim() == 2 and p.numel())]
    return [{"params": wanted[::2], "lr": 0.03}, {"params": wanted[1::2]}]


def data(dtype: str, step: int, index: int) -> Tensor:
    x = torch.randn(
        3, 7, generator=torch.Generator().manual_seed(100 * step + index), dtype=torch.float64
    )
    return x.to(getattr(torch, dtype))


def grained(kind: str, dtype: str, stage: int, seed: int = 0, **config: Any) -> Any:
    from ds_core import comm

    model = net(dtype, seed)
    sums = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
    low: dict[str, Any] = {
        "bfloat16": {"bf16": {"enabled": True}, **sums},
        "float16": {"fp16": {"enabled": True, "loss_scale": 8}, **sums},
    }
    # One is declared, by its name; the others are made by functions of torch's.
    lamb = {"type": "PaperLamb", "params": {"lr": 0.02}}
    groups = groups_of(model, kind)
    return start(
        model,
        micro=3,
        gas=GLOBAL // comm.world_size(),
        optimizer=lamb if kind == "lamb" else MAKERS[kind](groups),
        model_parameters=groups if kind == "lamb" else None,
        **{
            **({"zero_optimization": {"stage": stage, **SMALL}} if stage else {}),
            **low.get(dtype, {}),
            **LOAD,
            **config,
        },
    )


def steps(engine: Any, dtype: str, which: range) -> list[float]:
    from ds_core import comm

    losses = []
    for step in which:
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(GLOBAL // comm.world_size()):
            loss = engine(data(dtype, step, micro * comm.world_size() + comm.rank()))
            total += loss.detach().double() / GLOBAL
            engine.backward(loss)
            engine.step()
        comm.all_reduce(total)
        losses.append(total.item())
    return losses


def whole(engine: Any) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found
