"""A model whose states are offloaded, its training, and what is on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

STORE = "plugins.zero.tests.disk_store"
CPU = {"device": "cpu", "pin_memory": True}
FEW = {"device": "disk", "max_in_cpu": 0, "buffer_count": 2, "buffer_size": 300}
STATES = {"offload_optimizer": CPU}
WEIGHTS = {"offload_param": CPU}
ALL = {"offload_optimizer": CPU, "offload_param": CPU}
D = 24
LAYERS = 5
DTYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "loss_scale": 64}},
}


class Net(nn.Module):
    """Frozen, tied and odd-sized weights, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(7, D)
        self.layers = nn.ModuleList(nn.Linear(D, D, bias=i % 2 == 0) for i in range(LAYERS))
        self.layers[3].weight = self.layers[1].weight
        self.layers[2].weight.requires_grad_(False)
        self.spare = nn.Linear(3, 5)
        self.out = nn.Linear(D, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return self.out(x).float().square().mean()


def make(
    zero: dict[str, Any], folder: Path | None = None, *, dtype: str = "float32", **more: Any
) -> Any:
    import ds_core

    torch.manual_seed(0)
    model = more.pop("model", None) or Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1}},
        "zero_optimization": {"reduce_bucket_size": 900, "param_persistence_threshold": 20, **zero},
        **DTYPES[dtype],
    }
    if folder is not None:
        config |= {"plugins": {"load": [f"disk={STORE}"]}, "disk": {"path": str(folder)}}
    optimizer = more.pop("optimizer", None)
    if "optimizer_section" in more:
        config["optimizer"] = more.pop("optimizer_section")
    engine, *_ = ds_core.initialize(
        model=model,
        model_parameters=more.pop("model_parameters", None),
        optimizer=optimizer,
        config=config | more,
    )
    return engine


def steps(engine: Any, which: range, gas: int = 1, width: int = 7) -> list[float]:
    """Losses on this rank."""
    from ds_core import comm

    losses = []
    dtype = engine.ctx.precision.param or torch.float32
    for step in which:
        for micro in range(gas):
            seed = 1000 * step + 10 * micro + comm.rank()
            x = torch.randn(2, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
            loss = engine(x)
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def whole(engine: Any) -> dict[str, Tensor]:
    from ds_testing.truth import whole_weights

    found: dict[str, Tensor] = whole_weights(engine)
    return found


def host_grads(engine: Any) -> list[Tensor]:
    """The host memory of reduced gradients."""
    from ds_zero.reduce.bucket_grads import HostGrads

    grads = [engine.partitioner.reducer.grads(b) for b in engine.partitioner.reducer.buckets]
    return [g.host for g in grads if isinstance(g, HostGrads) and g.host is not None]


def trained(
    zero: dict[str, Any], dtype: str, gas: int, folder: Path | None = None, **more: Any
) -> Any:
    engine = make(zero, folder, dtype=dtype, gradient_accumulation_steps=gas, **more)
    losses = steps(engine, range(3), gas)
    found = whole(engine), losses, engine.get_global_grad_norm()
    engine.destroy()
    return found


DISK = {"offload_optimizer": {"device": "disk", "pipeline_read": True}, "offload_param": FEW}
