"""Optimizers on two ranks, plain and under ZeRO: as one process with the whole batch, through a
checkpoint.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ds_testing import run_ranks
from ds_testing.truth import plain, relative, start, train, weights, whole_weights
from torch import Tensor, nn

SMALL = {"reduce_bucket_size": 60, "param_persistence_threshold": 5, "prefetch_bucket_size": 40}
KINDS: dict[str, dict[str, Any]] = {
    "Adam": {"adam_w_mode": False, "lr": 0.02},
    "FusedAdam": {"lr": 0.02},
    "Adagrad": {"lr": 0.02, "lr_decay": 0.01},
    "Lion": {"lr": 1e-3},
    "Lamb": {"lr": 0.01},
    "Muon": {"lr": 5e-3, "adam_lr": 2e-3},
    "SGD": {"lr": 0.05, "momentum": 0.9},
}
WORLD = 2


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 7)
        self.mid = nn.Linear(7, 9)
        self.unused = nn.Linear(2, 2)
        self.out = nn.Linear(9, 3, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return (
            (self.out(torch.tanh(self.mid(torch.tanh(self.embed(x))))) * self.scale - 0.3)
            .square()
            .mean()
        )


def net() -> Net:
    torch.manual_seed(5)
    return Net().double()


def groups(model: Net) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [{"params": params[:3], "weight_decay": 0.1}, {"params": params[3:]}]


def batch(step: int, rank: int) -> Tensor:
    make = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(2, 5, generator=make, dtype=torch.float64)


def alone(kind: str, steps: int) -> nn.Module:
    """One process with plain torch around the optimizer's class, which other tests hold against its
    reference.
    """
    import ds_optimizers
    from ds_optimizers.muon import split_groups

    model = net()
    params = dict(KINDS[kind])
    names = {p: n for n, p in model.named_parameters()}
    wanted = split_groups(groups(model), names, **params) if kind == "Muon" else groups(model)
    optimizer = partial(getattr(ds_optimizers, kind), **params)
    plain(model, batch, steps, count=WORLD, optimizer=optimizer, groups=wanted)
    return model


def engine_of(kind: str, stage: int) -> Any:
    model = net()
    return start(
        model,
        optimizer={"type": kind, "params": KINDS[kind]},
        model_parameters=groups(model),
        plugins={"load": ["ds_optimizers.plugin"]},
        **({"zero_optimization": {"stage": stage, **SMALL}} if stage else {}),
    )


def errors_of(stage: int, steps: int, folder: str) -> dict[str, float]:
    errors = {}
    for kind in KINDS:
        engine = engine_of(kind, stage)
        train(engine, batch, range(steps // 2))
        engine.save_checkpoint(f"{folder}/{kind}", tag="half")
        engine.destroy()
        engine = engine_of(kind, stage)
        engine.load_checkpoint(f"{folder}/{kind}", tag="half")
        train(engine, batch, range(steps // 2, steps))
        found = whole_weights(engine)
        for name, weight in weights(alone(kind, steps)).items():
            errors[f"{kind} {name}"] = relative(found[name], weight)
        engine.destroy()
    return errors


@pytest.mark.fast_cases("3-20")
@pytest.mark.parametrize("steps", [20, pytest.param(100, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3]
)
def test_two_ranks_do_what_one_does(stage: int, steps: int, tmp_path: Path) -> None:
    for errors in run_ranks(WORLD, errors_of, stage, steps, str(tmp_path)):
        assert len(errors) == len(KINDS) * 8
        bad = {k: e for k, e in errors.items() if not e <= 1e-9}
        assert not bad


def across(folder: str, stage: int, other: int, kind: str) -> float:
    engine = engine_of(kind, stage)
    train(engine, batch, range(6))
    engine.save_checkpoint(folder, tag="six")
    engine.destroy()
    engine = engine_of(kind, other)
    engine.load_checkpoint(folder, tag="six")
    train(engine, batch, range(6, 12))
    found = whole_weights(engine)
    engine.destroy()
    return max(relative(found[n], w) for n, w in weights(alone(kind, 12)).items())


@pytest.mark.parametrize(
    ("kind", "stage", "other"), [("Lamb", 0, 3), ("Muon", 3, 0), ("FusedAdam", 2, 0)]
)
def test_a_checkpoint_of_one_stage_goes_on_under_another(
    kind: str, stage: int, other: int, tmp_path: Path
) -> None:
    assert max(run_ranks(WORLD, across, str(tmp_path), stage, other, kind)) <= 1e-10
