"""A tiny network, trained by the engine and by plain torch, for the tests of the engine."""

from __future__ import annotations

import torch
from ds_testing.truth import plain
from torch import nn

import ds_core

SGD = {"type": "SGD", "params": {"lr": 0.1}}
# the core's own optimizers and kernels, bit for bit
OWN = {"plugins": {"disable": ["dscore-optimizers", "dscore-ops-cpu"]}}
BASE = {"train_micro_batch_size_per_gpu": 2, "optimizer": SGD, "gradient_clipping": 0}


def model(seed=0, dtype=torch.float32):
    """A network of two layers, the same for each seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)


class Squares(nn.Module):
    """A module that gives its loss."""

    def __init__(self):
        super().__init__()
        self.net = model()

    def forward(self, x):
        return self.net(x).square().mean()


def initialized(config=None, net=None, **kwargs):
    """What `ds_core.initialize` gives for it, with the core's own optimizers and kernels."""
    net = net if net is not None else model()
    return ds_core.initialize(model=net, config={**BASE, **OWN, **(config or {})}, **kwargs)


def data(n, seed=1, dtype=torch.float32):
    """`n` micro-batches of two samples."""
    return list(
        torch.randn(n, 2, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(
            dtype
        )
    )


def alone(xs, gas=1, clip=0.0, net=None):
    """The network after torch alone has trained it on `xs`, `gas` micro-batches a step."""
    net = net or model()
    plain(net, lambda step, i: xs[gas * step + i], len(xs) // gas, count=gas, clip=clip)
    return net
