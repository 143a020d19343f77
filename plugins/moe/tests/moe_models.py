"""A model with two MoE layers for the conformance kits, and the same written plainly in one
process.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))

from ds_moe import MoE
from moe_reference import masks_top1, masks_top2, masks_topk

from ds_core import comm

HIDDEN = 6
NUM = 4
WIDE = 9
QUIET = {"use_rts": False, "top2_2nd_expert_sampling": False, "min_capacity": 0}


class Net(nn.Module):
    """Linear, MoE, MoE, linear; its loss takes the auxiliary losses in."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.inp = nn.Linear(5, HIDDEN)
        self.first = first
        self.second = second
        self.out = nn.Linear(HIDDEN, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.inp(x))
        a, aux1, _ = self.first(h)
        b, aux2, _ = self.second(h + a)
        return (self.out(h + b) - y).square().sum() / 20 + 0.1 * (aux1 + aux2)


def expert() -> nn.Module:
    return nn.Sequential(nn.Linear(HIDDEN, WIDE), nn.SiLU(), nn.Linear(WIDE, HIDDEN))


class PlainExperts(nn.Module):
    """Stacked weights under the names that `Experts` gives them."""

    def __init__(self) -> None:
        super().__init__()
        self.stacked = nn.Module()
        for name, linear in expert().named_children():
            if isinstance(linear, nn.Linear):
                part = nn.Module()
                for key, p in linear.named_parameters():
                    part.register_parameter(key, nn.Parameter(torch.zeros(NUM, *p.shape)))
                self.stacked.add_module(name, part)

    def forward(self, buffers: Tensor) -> Tensor:
        """buffers: [E, C, hidden]."""
        up = self.stacked.get_submodule("0")
        down = self.stacked.get_submodule("2")
        h = torch.einsum("ecm,ehm->ech", buffers, up.weight) + up.bias[:, None]
        return torch.einsum("ech,emh->ecm", nn.functional.silu(h), down.weight) + down.bias[:, None]


class PlainMoE(nn.Module):
    """Masks and einsum."""

    def __init__(self, k: int, factor: float | None, residual: bool = False) -> None:
        super().__init__()
        self.gate = nn.Module()
        self.gate.wg = nn.Linear(HIDDEN, NUM, bias=False)
        self.experts = PlainExperts()
        self.k = k
        self.factor = factor
        if residual:
            self.mlp = expert()
            self.coefficient = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Any:
        import math

        logits = self.gate.wg(x)
        room = None if self.factor is None else math.ceil(len(x) / NUM * self.k * self.factor)
        if not len(x):
            return (
                self.experts(x.expand(NUM, 0, HIDDEN)).sum(0) + 0 * logits.sum(),
                logits.sum(),
                None,
            )
        masks = {1: masks_top1, 2: masks_top2}.get(self.k, lambda a, b: masks_topk(a, self.k, b))
        combine, aux, counts = masks(logits, room)
        out = self.experts(torch.einsum("sec,sm->ecm", (combine != 0).to(x.dtype), x))
        out = torch.einsum("sec,ecm->sm", combine, out)
        if hasattr(self, "mlp"):
            mixing = self.coefficient(x).softmax(-1)
            out = out * mixing[:, :1] + self.mlp(x) * mixing[:, 1:]
        return out, aux, counts


@torch.no_grad()
def fill(model: nn.Module) -> nn.Module:
    """Weights that depend on their names alone; of experts, on their global numbers."""
    for name, param in model.named_parameters():
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        rows = NUM if ".experts." in name else None
        shape = param.shape if rows is None else (rows, *param.shape[1:])
        whole = torch.randn(shape, generator=generator, dtype=torch.float64) * 0.5
        if rows is not None:
            here = (comm.rank() if comm.is_initialized() else 0) % (rows // len(param)) * len(param)
            whole = whole[here : here + len(param)]
        if name.endswith("gate.wg.weight"):
            whole[0] += 0.4  # one expert that is liked more than the others
        param.copy_(whole)
    return model


def moe_net(ep: int, k: int, factor: float | None, residual: bool = False) -> nn.Module:
    """factor: of capacity; None drops nothing. The second layer's experts are on every rank."""
    options = {**QUIET, "drop_tokens": factor is not None, "capacity_factor": factor or 1.0}
    options["eval_capacity_factor"] = options["capacity_factor"]
    layers = [
        MoE(HIDDEN, expert(), NUM, ep_size=size, k=k, use_residual=residual, **options)  # type: ignore[arg-type]
        for size in (ep, ep if k > 1 else 1)
    ]
    return fill(Net(*layers).double())


def plain_net(k: int, factor: float | None, residual: bool = False) -> nn.Module:
    return fill(Net(*(PlainMoE(k, factor, residual) for _ in range(2))).double())


def batch(step: int, micro: int, index: int) -> dict[str, Tensor]:
    """Each rank has another number of tokens, and each has none at times."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + index)
    tokens = (index * 5 + step * 3 + micro) % 4 * 4
    x = torch.randn(tokens, 5, generator=generator, dtype=torch.float64)
    return {"x": x, "y": torch.randn(tokens, 3, generator=generator, dtype=torch.float64)}


def one_top1() -> nn.Module:
    return moe_net(1, 1, None)


def two_top1() -> nn.Module:
    return moe_net(2, 1, None)


def four_top1() -> nn.Module:
    return moe_net(4, 1, None)


def plain_top1() -> nn.Module:
    return plain_net(1, None)


def two_top1_drop() -> nn.Module:
    return moe_net(2, 1, 1.0)


def plain_top1_drop() -> nn.Module:
    return plain_net(1, 1.0)


def one_top2() -> nn.Module:
    return moe_net(1, 2, 0.75, residual=True)


def two_top2() -> nn.Module:
    return moe_net(2, 2, 0.75, residual=True)


def four_top2() -> nn.Module:
    return moe_net(4, 2, 0.75, residual=True)


def plain_top2() -> nn.Module:
    return plain_net(2, 0.75, residual=True)


def two_top4() -> nn.Module:
    return moe_net(2, 4, 0.5)


def four_top4() -> nn.Module:
    return moe_net(4, 4, 0.5)


def plain_top4() -> nn.Module:
    return plain_net(4, 0.5)


FACTORS = {1: 1.0, 2: 0.75, 4: 0.5}
WHOLE = list(itertools.product((1, 2, 4), (1, 2, 4), (False, True)))
"""ep, k, whether tokens are dropped; of each, functions ``ep{ep}_top{k}_{drop}`` and
``plain_top{k}_{drop}``.
"""


def _add(name: str, function: Any) -> None:
    """Make `function` one of this module's, which worker processes find by its name."""
    function.__name__ = function.__qualname__ = name
    globals()[name] = function


for _ep, _k, _drop in WHOLE:
    _factor = FACTORS[_k] if _drop else None
    _add(f"ep{_ep}_top{_k}_{_drop}", lambda ep=_ep, k=_k, factor=_factor: moe_net(ep, k, factor))
    _add(f"plain_top{_k}_{_drop}", lambda k=_k, factor=_factor: plain_net(k, factor))
