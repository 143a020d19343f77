"""A tiny network, trained by the engine and by plain torch, for the tests of the engine."""

from __future__ import annotations

import torch
from torch import nn

import ds_core

SGD = {"type": "SGD", "params": {"lr": 0.1}}
# the core's own optimizers and kernels, bit for bit
OWN = {"plugins": {"disable": ["ds-optimizers", "ds-ops-cpu"]}}
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


def start(config=None, net=None, **kwargs):
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


def plain(xs, gas=1, lr=0.1, clip=0.0, net=None):
    """The network after torch alone has trained it on `xs`, `gas` micro-batches a step."""
    net = net or model()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for i, x in enumerate(xs):
        (net(x).square().mean() / gas).backward()
        if (i + 1) % gas == 0:
            if clip:
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return net


def same(a, b, tolerance=0.0):
    """Assert that two networks have the same weights."""
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=tolerance, atol=tolerance), (p - q).abs().max()
