"""MuAdam, MuAdamW and MuSGD: torch's optimizers over groups that are scaled by hand, alone and on
ranks under ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ds_optimizers
import pytest
import torch
from ds_testing import run_ranks
from torch import Tensor, nn

import ds_core
from ds_core.errors import ConfigError, UsageError

BASE = 4
WIDTH = 16
KINDS: dict[str, dict[str, Any]] = {
    "MuAdam": {"lr": 0.02, "weight_decay": 0.1},
    "MuAdamW": {"lr": 0.02, "weight_decay": 0.1},
    "MuSGD": {"lr": 0.03, "weight_decay": 0.05, "momentum": 0.9},
}


@dataclass(frozen=True)
class Grown:
    """What ``mup.InfShape`` says of a parameter: per dimension its size beside the base model's,
    None if fixed.
    """

    dims: tuple[float | None, ...]

    def ninf(self) -> int:
        return sum(d is not None for d in self.dims)

    def width_mult(self) -> float:
        return next((d for d in reversed(self.dims) if d is not None), 1)

    def fanin_fanout_mult_ratio(self) -> float:
        return (self.dims[1] or 1) / (self.dims[0] or 1)


def build(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(3)
    layers = [
        nn.Linear(6, width),
        nn.Tanh(),
        nn.Linear(width, 2 * width),
        nn.Tanh(),
        nn.Linear(2 * width, width // 2),
    ]
    return nn.Sequential(*layers, nn.Tanh(), nn.Linear(width // 2, 3)).double()


def model() -> nn.Sequential:
    """`build` with ``infshape``, as ``mup.set_base_shapes(model, base)`` sets it."""
    made = build()
    for param, base in zip(made.parameters(), build(BASE).parameters(), strict=True):
        dims = zip(param.shape, base.shape, strict=True)
        param.infshape = Grown(tuple(None if n == b else n / b for n, b in dims))  # type: ignore[attr-defined]
    return made


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(
        2, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
    )


def loss_of(out: Tensor) -> Tensor:
    return (out - 0.3).square().mean()


def by_hand(made: nn.Sequential, kind: str) -> list[dict[str, Any]]:
    """Every parameter as a group of its own: all widths grew by 4, and so did both sides of the
    hidden matrices.
    """
    params = KINDS[kind]
    rate = WIDTH // BASE
    names = dict(made.named_parameters())
    factors = dict.fromkeys(names, 1.0)
    # hidden matrices: fan-in and fan-out grew alike; vectors, inputs and outputs by the width
    if kind == "MuSGD":
        factors |= {n: float(rate) for n in names if n not in ("2.weight", "4.weight", "6.bias")}
    else:
        factors |= dict.fromkeys(("2.weight", "4.weight"), 1 / rate)
    return [
        {
            "params": [p],
            "lr": params["lr"] * factors[n],
            "weight_decay": params["weight_decay"] / factors[n],
        }
        for n, p in names.items()
    ]


def alone(kind: str, steps: int, world: int) -> dict[str, Tensor]:
    made = build()
    extra = {"momentum": 0.9} if kind == "MuSGD" else {}
    optimizer = getattr(torch.optim, kind.removeprefix("Mu"))(by_hand(made, kind), **extra)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world):
            (loss_of(made(batch(step, rank))) / world).backward()
        optimizer.step()
    return {n: p.detach() for n, p in made.named_parameters()}


def start(kind: str, stage: int, made: nn.Module | None = None, **config: Any) -> Any:
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0,
        "optimizer": {"type": kind, "params": KINDS[kind]},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 90,
            "param_persistence_threshold": 5,
        },
        **config,
    }
    return ds_core.initialize(model=model() if made is None else made, config=config)[0]


def train(stage: int, kind: str, steps: int) -> dict[str, float]:
    from ds_testing.truth import relative, whole_weights

    from ds_core import comm

    engine = start(kind, stage)
    for step in range(steps):
        engine.backward(loss_of(engine(batch(step, comm.rank()))))
        engine.step()
    assert type(engine.optimizer).__name__ == kind
    found = whole_weights(engine)
    return {n: relative(found[n], w) for n, w in alone(kind, steps, comm.world_size()).items()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_has_its_own_rate_and_decay(kind: str) -> None:
    errors = train(0, kind, 20)
    assert len(errors) == 8 and max(errors.values()) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_classes_split_by_themselves(kind: str) -> None:
    made = model()
    params = KINDS[kind]
    optimizer = getattr(ds_optimizers, kind)(made.parameters(), **params)
    for step in range(5):
        optimizer.zero_grad()
        loss_of(made(batch(step, 0))).backward()
        optimizer.step()
    wanted = alone(kind, 5, 1)
    assert all(torch.allclose(p, wanted[n], rtol=1e-10) for n, p in made.named_parameters())
    again = getattr(ds_optimizers, kind)(optimizer.param_groups, **params)
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))]
)
def test_two_ranks_do_what_one_does(stage: int) -> None:
    for errors in run_ranks(2, train, stage, "MuAdamW", 10):
        assert len(errors) == 8 and max(errors.values()) <= 1e-10


def test_groups_keep_what_is_theirs() -> None:
    made = model()
    groups = [
        {"params": made[2].parameters(), "lr": 1.0, "name": "hidden"},
        {"params": made[0].bias},
    ]
    optimizer = ds_optimizers.MuAdam(groups, lr=0.5, weight_decay=0.2)
    found = [(g.get("name"), g["lr"], g["weight_decay"]) for g in optimizer.param_groups]
    assert found == [("hidden", 0.25, 0.8), ("hidden", 1.0, 0.2), (None, 0.5, 0.2)]


def test_a_parameter_without_base_shape_is_an_error_that_names_it() -> None:
    with pytest.raises(
        ConfigError,
        match=r"type: '0.weight': .* of shape \(16, 6\) has no infshape.*set_base_shapes",
    ):
        start("MuAdam", 0, build())
    with pytest.raises(UsageError, match="has no infshape"):
        ds_optimizers.MuSGD(build().parameters())
    cube = nn.Parameter(torch.zeros(2, 2, 2))
    cube.infshape = Grown((2, 2, 2))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="3 dimensions that grew"):
        ds_optimizers.MuAdamW([cube])


def test_a_schedule_must_leave_the_widths_their_rates() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler.type: 'WarmupLR' sets one learning rate.*WarmupCosineLR"
    ):
        start("MuAdam", 0, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}})
    rates = {"warmup_min_lr": 0, "warmup_max_lr": [0.1, 0.2]}
    start("MuAdam", 0, scheduler={"type": "WarmupLR", "params": rates})
    params = {"total_num_steps": 10, "warmup_num_steps": 2}
    engine = start("MuAdam", 0, scheduler={"type": "WarmupCosineLR", "params": params})
    for step in range(4):
        engine.backward(loss_of(engine(batch(step, 0))))
        engine.step()
    narrow, wide = sorted({g["lr"] for g in engine.optimizer.param_groups})
    assert wide == pytest.approx(4 * narrow)
