"""Models of the tests, and training of them in one process and on ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 16
ROWS = 4


class Block(nn.Module):
    """Has dropout, running statistics, a weight of its own, keyword and other arguments, and two
    results.
    """

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH, bias=False)
        self.drop = nn.Dropout(0.25)

    def forward(
        self, x: Tensor, factor: float = 1.0, *, shift: Tensor | None = None
    ) -> tuple[Tensor, float]:
        hidden = self.drop(torch.tanh(self.up(self.norm(x) * self.scale)))
        return x + factor * self.down(hidden) + (0 if shift is None else shift), factor


class Net(nn.Module):
    """Blocks in a list between two layers."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.last = nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        factor = 0.5
        shift = x.detach().mean(0)
        for block in self.blocks:
            x, factor = block(x, factor, shift=shift)
        out: Tensor = self.last(x)
        return out


def net(blocks: int = 3) -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net(blocks)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(10 * step + rank))


def config(**sections: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9}},
        **sections,
    }


def losses_and_state(
    model: nn.Module, config: Mapping[str, Any], steps: int, batches: Sequence[int] = (0,)
) -> dict[str, Tensor]:
    """Losses and weights of an engine over `model`; the random numbers are the same in each
    call."""
    import ds_core
    from ds_core import comm

    engine, *_ = ds_core.initialize(model=model, config=dict(config))
    torch.manual_seed(5 + comm.rank())
    losses = []
    for step in range(steps):
        for index in batches:
            loss = engine(batch(step + 100 * index, comm.rank())).square().mean()
            engine.backward(loss)
            losses.append(loss.detach())
        engine.step()
    engine.destroy()
    return {
        "losses": torch.stack(losses),
        **{n: t.detach().clone() for n, t in engine.module.state_dict().items()},
    }
