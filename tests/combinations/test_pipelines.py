"""Pipelines with stages of ZeRO, schedules, accumulation, clipping, groups, tied and frozen
weights, in three dtypes; saved in the middle and gone on with in another layout: losses and weights
are those of plain torch in one process.
"""

from __future__ import annotations

import copy
import functools
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import models as m
from ds_access import safe_get_full_fp32_param
from ds_testing import run_ranks
from ds_testing.truth import start
from torch import Tensor, nn

LR = 0.05
CLIP = 0.05
STEPS = 4
ADAMW = {"lr": LR, "eps": 0.1, "weight_decay": 0.1}
"""The eps keeps small what rounding does to small gradients."""
FROZEN = "layers.1.attention.k_proj.weight"
EXACT = {"float64": 1e-12, "float32": 3e-5, "bfloat16": 0.03}
"""How far numbers may be off, of the loss and of the way that all weights went together."""

Layout = tuple[int, str, int]
"""Stages, schedule, stage of ZeRO."""


def decay(step: int) -> float:
    return 1.0 / (1 + step)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and the rest without weight decay: what some stages have nothing of."""
    for name, param in model.named_parameters():
        param.requires_grad_(name != FROZEN)
    trained = [p for p in model.parameters() if p.requires_grad]
    rest = {"params": [p for p in trained if p.dim() < 2], "weight_decay": 0.0, "lr": LR / 2}
    return [{"params": [p for p in trained if p.dim() > 1]}, rest]


def schedule_of(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, decay)


# -- as a pipeline ---------------------------------------------------------------------------------


def pipeline_engine(layout: Layout, micros: int, clip: float, dtype: str) -> Any:
    stages, schedule, zero = layout
    model = m.pipeline(stages=stages, chunks=2 if schedule == "interleaved" else 1)
    dp = torch.distributed.get_world_size() // stages if torch.distributed.is_initialized() else 1
    low: dict[str, Any] = {}
    if dtype == "bfloat16":
        low = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    else:
        model = model.to(getattr(torch, dtype))
    return start(
        model,
        micro=m.MICRO,
        gas=micros // dp,
        clip=clip,
        optimizer={"type": "AdamW", "params": ADAMW},
        model_parameters=groups_of(model),
        lr_scheduler=schedule_of,
        pipeline={"schedule": schedule},
        zero_optimization={
            "stage": zero,
            "reduce_bucket_size": 300,
            "param_persistence_threshold": 8,
        },
        **low,
    )


def losses_of(engine: Any, steps: range, micros: int) -> list[float]:
    dp = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    own = micros // dp
    found = []
    for step in steps:
        row = [m.pipe_batch(step, index * own + micro, 0) for micro in range(own)]
        found.append(float(engine.train_batch(iter(row))))
    return found


def pipelined(
    folder: str, layouts: list[Layout], micros: int, clip: float, dtype: str
) -> tuple[list[float], Any]:
    """Losses of all steps, the second half in the second layout, and this rank's weights in the
    end.
    """
    half = STEPS // 2
    engine = pipeline_engine(layouts[0], micros, clip, dtype)
    losses = losses_of(engine, range(half), micros)
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = pipeline_engine(layouts[1], micros, clip, dtype)
    engine.load_checkpoint(folder)
    losses += losses_of(engine, range(half, STEPS), micros)
    params = {name: p for name, p in engine.module.named_parameters() if p.requires_grad}
    weights = {name: safe_get_full_fp32_param(p).cpu() for name, p in params.items()}
    engine.destroy()
    return losses, weights


# -- in one process --------------------------------------------------------------------------------


@functools.cache
def alone(
    micros: int, clip: float, dtype: str
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, weights at the begin and in the end.

    In bf16 the model is a copy, rounded, of the fp32 weights.
    """
    model = m.undivided().to(getattr(torch, dtype))
    weights = copy.deepcopy(model).float() if dtype == "bfloat16" else model
    optimizer = torch.optim.AdamW(groups_of(weights), **ADAMW)  # type: ignore[arg-type]
    schedule = schedule_of(optimizer)
    groups_of(model)
    begin = {name: p.detach().clone() for name, p in weights.named_parameters()}
    losses = []
    for step in range(STEPS):
        with torch.no_grad():
            for used, weight in zip(model.parameters(), weights.parameters(), strict=True):
                used.copy_(weight)
        total = 0.0
        for micro in range(micros):
            if model is not weights:
                model.zero_grad()
            inputs, labels = m.pipe_batch(step, micro, 0)
            loss = model(inputs, labels) / micros
            loss.backward()
            total += loss.item()
            for used, weight in zip(model.parameters(), weights.parameters(), strict=True):
                if used is not weight and used.grad is not None:
                    weight.grad = (
                        used.grad.float() if weight.grad is None else weight.grad + used.grad
                    )
        if clip:
            nn.utils.clip_grad_norm_(weights.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, begin, {name: p.detach() for name, p in weights.named_parameters()}


# -- compared --------------------------------------------------------------------------------------


def check(
    world: int, layouts: list[Layout], micros: int, clip: float, dtype: str, folder: Path
) -> None:
    losses, begin, end = alone(micros, clip, dtype)
    ranks = run_ranks(world, pipelined, str(folder), layouts, micros, clip, dtype)
    whole: dict[str, Tensor] = {}
    for told, weights in ranks:
        assert told == pytest.approx(losses, rel=EXACT[dtype])
        for name, weight in weights.items():
            assert torch.equal(whole.setdefault(name, weight), weight), (
                f"{name} differs between ranks"
            )
    assert whole.keys() == end.keys() - {FROZEN}
    off = (
        sum(float((whole[name].double() - end[name].double()).square().sum()) for name in whole)
        ** 0.5
    )
    went = (
        sum(float((begin[name].double() - end[name].double()).square().sum()) for name in whole)
        ** 0.5
    )
    assert off < EXACT[dtype] * went, f"weights are {off / went:.3g} of their way off"


FEW = [
    (2, [(2, "zero_bubble", 2), (1, "1f1b", 3)], 4, CLIP, "float64"),
    (4, [(2, "interleaved", 3), (4, "1f1b", 1)], 4, CLIP, "float32"),
]


@pytest.mark.fast_cases("2-layouts0-4-0.05-float64")
@pytest.mark.parametrize(("world", "layouts", "micros", "clip", "dtype"), FEW)
def test_a_few(
    world: int, layouts: list[Layout], micros: int, clip: float, dtype: str, tmp_path: Path
) -> None:
    check(world, layouts, micros, clip, dtype, tmp_path)


def layouts_of(world: int) -> list[Layout]:
    """Each number of stages with each schedule that it can have, at every stage of ZeRO."""
    shapes = [
        (1, "1f1b"),
        (2, "1f1b"),
        (2, "zero_bubble"),
        (2, "interleaved"),
        (4, "1f1b"),
        (4, "zero_bubble"),
    ]
    return [
        (stages, how, zero)
        for (stages, how), zero in itertools.product(shapes, range(4))
        if stages <= world
    ]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("world", [2, 4])
def test_all_of_them(world: int, dtype: str, tmp_path: Path) -> None:
    """Each layout is left once for another, far from it in the list, and taken up once."""
    layouts = layouts_of(world)
    variants = itertools.cycle([(4, CLIP), (8, 0.0), (8, CLIP), (4, 0.0)])
    for place, layout in enumerate(layouts):
        other = layouts[(place + 7) % len(layouts)]
        check(world, [layout, other], *next(variants), dtype, tmp_path / str(place))
