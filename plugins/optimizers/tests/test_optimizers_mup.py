"""MuAdam, MuAdamW and MuSGD: torch's optimizers over groups that are scaled by hand, alone and on
ranks under ZeRO.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import ds_optimizers
import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import plain, relative, same, start, train, weights, whole_weights
from torch import Tensor, nn

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


def net(width: int = WIDTH) -> nn.Sequential:
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
    made = net()
    for param, base in zip(made.parameters(), net(BASE).parameters(), strict=True):
        dims = zip(param.shape, base.shape, strict=True)
        param.infshape = Grown(tuple(None if n == b else n / b for n, b in dims))  # type: ignore[attr-defined]
    return made


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(
        2, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64
    )


def loss(model: Any, x: Tensor) -> Tensor:
    out: Tensor = (model(x) - 0.3).square().mean()
    return out


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


def alone(kind: str, steps: int, world: int) -> nn.Module:
    made = net()
    extra = {"momentum": 0.9} if kind == "MuSGD" else {}
    optimizer = partial(getattr(torch.optim, kind.removeprefix("Mu")), **extra)
    groups = by_hand(made, kind)
    plain(made, batch, steps, count=world, optimizer=optimizer, groups=groups, loss=loss)
    return made


def engine_of(kind: str, stage: int, made: nn.Module | None = None, **config: Any) -> Any:
    zero = {"stage": stage, "reduce_bucket_size": 90, "param_persistence_threshold": 5}
    optimizer = {"type": kind, "params": KINDS[kind]}
    made = model() if made is None else made
    return start(made, optimizer=optimizer, **{"zero_optimization": zero, **config})


def errors_of(stage: int, kind: str, steps: int) -> dict[str, float]:
    from ds_core import comm

    engine = engine_of(kind, stage)
    train(engine, batch, steps, loss=loss)
    assert type(engine.optimizer).__name__ == kind
    found = whole_weights(engine)
    wanted = weights(alone(kind, steps, comm.world_size()))
    return {n: relative(found[n], w) for n, w in wanted.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_part_has_its_own_rate_and_decay(kind: str) -> None:
    errors = errors_of(0, kind, 20)
    assert len(errors) == 8 and max(errors.values()) <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_the_classes_split_by_themselves(kind: str) -> None:
    made = model()
    params = KINDS[kind]
    optimizer = getattr(ds_optimizers, kind)(made.parameters(), **params)
    for step in range(5):
        optimizer.zero_grad()
        loss(made, batch(step, 0)).backward()
        optimizer.step()
    same(made, alone(kind, 5, 1), 1e-10)
    again = getattr(ds_optimizers, kind)(optimizer.param_groups, **params)
    assert [g["lr"] for g in again.param_groups] == [g["lr"] for g in optimizer.param_groups]


@pytest.mark.parametrize(
    "stage", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 1, 2))]
)
def test_two_ranks_do_what_one_does(stage: int) -> None:
    for errors in run_ranks(2, errors_of, stage, "MuAdamW", 10):
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
        engine_of("MuAdam", 0, net())
    with pytest.raises(UsageError, match="has no infshape"):
        ds_optimizers.MuSGD(net().parameters())
    cube = nn.Parameter(torch.zeros(2, 2, 2))
    cube.infshape = Grown((2, 2, 2))  # type: ignore[attr-defined]
    with pytest.raises(UsageError, match="3 dimensions that grew"):
        ds_optimizers.MuAdamW([cube])


def test_a_schedule_must_leave_the_widths_their_rates() -> None:
    with pytest.raises(
        ConfigError, match=r"scheduler.type: 'WarmupLR' sets one learning rate.*WarmupCosineLR"
    ):
        engine_of("MuAdam", 0, scheduler={"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}})
    rates = {"warmup_min_lr": 0, "warmup_max_lr": [0.1, 0.2]}
    engine_of("MuAdam", 0, scheduler={"type": "WarmupLR", "params": rates})
    params = {"total_num_steps": 10, "warmup_num_steps": 2}
    engine = engine_of("MuAdam", 0, scheduler={"type": "WarmupCosineLR", "params": params})
    train(engine, batch, 4, loss=loss)
    narrow, wide = sorted({g["lr"] for g in engine.optimizer.param_groups})
    assert wide == pytest.approx(4 * narrow)


def groups_of_a_stage() -> list[tuple[float, float, int]]:
    """Rates, and how many parameters there are, of the groups of one stage of a pipeline."""
    from ds_optimizers.mup import adam_groups

    from ds_core import comm

    layers = list(model())
    some = nn.Sequential(*(layers[:2] if comm.rank() == 0 else layers[2:]))
    names = {param: name for name, param in some.named_parameters()}
    groups = adam_groups([{"params": list(names)}], names, lr=0.02, weight_decay=0.1)
    return [(group["lr"], group["weight_decay"], len(group["params"])) for group in groups]


def test_stages_of_a_pipeline_have_the_same_groups() -> None:
    first, last = run_ranks(2, groups_of_a_stage)
    assert [row[:2] for row in first] == [row[:2] for row in last]
    assert [row[2] for row in first] != [row[2] for row in last]
    assert 0 in [row[2] for row in first]
