"""Small models, data and the plain-torch truth that the conformance kits compare with.

Everything is seeded and sized so that one case takes milliseconds, with shapes that divide by
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_testing.truth import plain, start, train, weights

WIDTH = 7
CLASSES = 5
MICRO = 3


@dataclass(frozen=True)
class Case:
    """One training run to compare."""

    model: str = "plain"
    """One of "plain", "frozen", "unused", "shared", "partly" (a layer that only some ranks use) or
    "groups".
    """
    dtype: str = "float64"
    """One of "float64", "float32" and "bfloat16"."""
    gas: int = 1
    """Micro-batches per step."""
    clip: float = 0.0
    steps: int = 4
    optimizer: str = "AdamW"
    """One of "AdamW" and "SGD"."""
    predivide: float = 1.0
    prescale: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        """`dtype` as torch has it."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def config(self, dp: int) -> dict[str, Any]:
        """The ds_core config of this case on `dp` data-parallel ranks."""
        params = (
            {"lr": 0.01, "weight_decay": 0.1}
            if self.optimizer == "AdamW"
            else {"lr": 0.05, "momentum": 0.9}
        )
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": MICRO,
            "gradient_accumulation_steps": self.gas,
            "gradient_clipping": self.clip,
            "optimizer": {"type": self.optimizer, "params": params},
        }
        if self.predivide != 1.0:
            config["gradient_predivide_factor"] = self.predivide
        if self.prescale:
            config["prescale_gradients"] = True
        if self.dtype == "bfloat16":
            config["bf16"] = {"enabled": True}
        return config


class _Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inp = nn.Linear(WIDTH, 13)
        self.mid = nn.Linear(13, 13, bias=False)
        self.out = nn.Linear(13, CLASSES)
        self.scale = nn.Parameter(torch.ones(()))
        if kind == "unused":
            self.spare = nn.Linear(3, 11)
        if kind == "partly":
            self.extra = nn.Linear(13, 13)
        if kind == "shared":
            self.again = nn.Linear(13, 13, bias=False)
            self.again.weight = self.mid.weight
        if kind == "frozen":
            self.mid.weight.requires_grad_(False)
            self.out.bias.requires_grad_(False)
        self.register_buffer("shift", torch.full((13,), 0.25))

    def forward(self, x: Tensor, y: Tensor, use_extra: bool = False) -> Tensor:
        h = torch.tanh(self.inp(x))
        h = h + self.get_buffer("shift").to(h.dtype)  # buffers keep their dtype in 16-bit modes
        h = torch.tanh(self.mid(h)) * self.scale
        if self.kind == "shared":
            h = torch.tanh(self.again(h))
        if self.kind == "partly" and use_extra:
            h = h + self.extra(h)
        return nn.functional.cross_entropy(
            self.out(h).float() if h.dtype == torch.bfloat16 else self.out(h), y
        )


def build_model(case: Case, seed: int = 0) -> nn.Module:
    """The case's model on the CPU, the same for the same seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return _Net(case.model).to(torch.float32 if case.dtype == "bfloat16" else case.torch_dtype)


def param_groups(case: Case, model: nn.Module) -> list[dict[str, Any]]:
    """Parameter groups: one, or for "groups" two with their own hyperparameters."""
    if case.model != "groups":
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decay, "lr": 0.02}, {"params": rest, "weight_decay": 0.0}]


def micro_batch(case: Case, step: int, micro: int, index: int) -> dict[str, Any]:
    """The micro-batch that dp rank `index` sees; "partly" uses its extra layer on even ranks
    only."""
    generator = torch.Generator().manual_seed(10_000 * step + 100 * micro + index)
    x = torch.randn(MICRO, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randint(0, CLASSES, (MICRO,), generator=generator)
    return {"x": x.to(case.torch_dtype), "y": y, "use_extra": index % 2 == 0}


def make_optimizer(case: Case, groups: Any) -> torch.optim.Optimizer:
    """The plain torch optimizer that the case's config asks for."""
    if case.optimizer == "AdamW":
        return torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9)


def reference_run(
    case: Case, dp: int, build: Callable[[Case], nn.Module] = build_model
) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process, with plain torch, on what all `dp` ranks see; returns (losses, final
    weights).

    Under bf16 the weights are bf16 copies of fp32 masters, as mixed precision means it.
    """
    model = build(case)
    losses = plain(
        model,
        lambda step, number: micro_batch(case, step, number // dp, number % dp),
        case.steps,
        count=case.gas * dp,
        clip=case.clip,
        optimizer=partial(make_optimizer, case),
        groups=param_groups(case, model),
        masters=case.dtype == "bfloat16",
    )
    return losses, weights(model)


class _Spectral(nn.Module):
    """A model with a complex weight, as Fourier layers have."""

    def __init__(self) -> None:
        super().__init__()
        self.mode = nn.Parameter(torch.randn(5, 3, dtype=torch.complex64))
        self.inp = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inp(x).to(torch.complex64) @ self.mode
        return out.abs().square().mean()


def complex_run(config: Mapping[str, Any]) -> float:
    """Train a model with a complex weight, with clipping, under `config` and in plain torch; the
    worst difference of a loss. Called on every rank."""
    from ds_core import comm

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return _Spectral()

    def batch(step: int, rank: int) -> Tensor:
        return torch.randn(2, 7, generator=torch.Generator().manual_seed(99 * step + rank))

    adamw = {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.01}}
    engine = start(build(), **{"clip": 0.5, "optimizer": adamw, **config})
    losses = train(engine, batch, 4)
    engine.destroy()
    truth = plain(build(), batch, 4, count=comm.world_size(), clip=0.5, optimizer=adamw)
    return max(abs(a - b) / b for a, b in zip(losses, truth, strict=True))
