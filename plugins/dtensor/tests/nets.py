"""Models, configs and runs that the tests of this folder share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import ds_core

STAGES = (0, 1, 2, 3)


class Net(nn.Module):
    """Odd sizes, a frozen layer, a shared weight, an unused one, a norm with buffers, a scalar.

    scalar: False for FSDP2, which takes none.
    """

    def __init__(self, scalar: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embed = nn.Embedding(11, 6)
        self.up_proj = nn.Linear(6, 10)
        self.down_proj = nn.Linear(10, 6)
        self.frozen = nn.Linear(6, 6, bias=False)
        self.unused = nn.Parameter(torch.randn(3, 5, 2))
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5 if scalar else [1.5]))
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down_proj(torch.tanh(self.up_proj(x))) * self.scale
        out: Tensor = self.head(self.frozen(x))
        return out


def config(stage: int, dtype: str = "fp32", tp: int = 1, **more: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.05, "weight_decay": 0.01, "torch_adam": True},
        },
        "plugins": {"require": ["dscore-dtensor"]},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
    }
    if dtype == "bf16":
        found["bf16"] = {"enabled": True}
    if tp > 1:
        found["tensor_parallel"] = {"autotp_size": tp}
    return found | more


def opened(stage: int, dtype: str = "fp32", tp: int = 1, scalar: bool = True, **more: Any) -> Any:
    given = config(stage, dtype, tp, **more)
    return ds_core.initialize(model=Net(scalar), config=given).engine


def plain_truth(steps: int) -> dict[str, Tensor]:
    """The state dict of the model that plain torch has trained in one process."""
    model = Net()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    for step in range(steps):
        optimizer.zero_grad()
        logits = model(batch(step))
        nn.functional.cross_entropy(logits.flatten(0, 1), batch(step + 1).flatten()).backward()
        optimizer.step()
    return model.state_dict()


def batch(step: int) -> Tensor:
    """Equal on all ranks, so that gradients do not depend on their number."""
    return (torch.arange(6).reshape(2, 3) * (step + 3)) % 11


def stepped(engine: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        logits = engine(batch(step)).float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch(step + 1).flatten())
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses
