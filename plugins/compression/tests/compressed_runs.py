"""A small model trained with compression on ranks, and the same by plain torch: what the tests
compare.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from ds_testing.truth import start, train
from torch import Tensor, nn

BATCH = 8
WIDTH = 8
HIDDEN = 16
STEPS = 6


class Net(nn.Module):
    """Two linear layers of a feed-forward block, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)
        self.head = nn.Linear(WIDTH, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x + self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


def net(seed: int = 3, dtype: torch.dtype = torch.float64) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(
        BATCH, WIDTH, generator=torch.Generator().manual_seed(100 + step), dtype=torch.float64
    ).to(dtype)


def loss_of(out: Tensor, x: Tensor) -> Tensor:
    return (out - x[:, :4].tanh()).square().mean()


def config(section: Mapping[str, Any], gas: int = 1, **more: Any) -> dict[str, Any]:
    return {
        "train_batch_size": BATCH,
        "gradient_accumulation_steps": gas,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
        "compression_training": copy.deepcopy(dict(section)),
        **more,
    }


Result = tuple[list[float], dict[str, Tensor]]


def trained(
    section: Mapping[str, Any],
    gas: int = 1,
    more: Mapping[str, Any] | None = None,
    first: int = 0,
    steps: int = STEPS,
    load: str | None = None,
    save: str | None = None,
    dtype: torch.dtype = torch.float64,
    inputs: torch.dtype | None = None,
) -> Result:
    """Losses of the global batches of steps `first` to `steps`, and the whole weights (fp32 export)
    at the end.
    """
    from ds_access import safe_get_full_fp32_param

    engine = start(net(dtype=dtype), **config(section, gas, **(more or {})))
    if load is not None:
        engine.load_checkpoint(load)
    parts = gas * engine.ctx.mesh.size("dp")
    losses = train(
        engine,
        lambda step, index: batch(step, inputs or dtype).chunk(parts)[index],
        range(first, steps),
        loss=lambda model, x: loss_of(model(x), x),
    )
    if save is not None:
        engine.save_checkpoint(save)
    weights = {}
    for name, param in engine.module.named_parameters():
        value = safe_get_full_fp32_param(param)
        assert value is not None
        weights[name] = value.cpu().clone()
    for name, buffer in engine.module.named_buffers():
        weights[name] = buffer.clone()
    engine.destroy()
    return losses, weights


def off(a: Result, b: Result) -> float:
    """The largest difference of losses, and of the weights that both have."""
    losses = max(abs(x - y) for x, y in zip(a[0], b[0], strict=True))
    names = a[1].keys() & b[1].keys()
    assert len(names) >= 5
    return max(losses, *(float((a[1][n].double() - b[1][n].double()).abs().max()) for n in names))
