"""Optimizers that look beyond one element, where ranks have parts of the model: equal to one
process, or refused.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import models as m
from ds_testing import run_ranks
from optimizer_trials import made
from torch.optim import AdamW

KINDS: dict[str, dict[str, Any]] = {
    "Muon": {"lr": 0.01, "weight_decay": 0.1},
    "NorMuon": {"lr": 0.01, "weight_decay": 0.1, "variant": "normuon"},
    "AdaMuon": {"lr": 0.01, "weight_decay": 0.1, "variant": "adamuon"},
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
    "Lion": {"lr": 0.001, "weight_decay": 0.1},
    "AdamMini": {"lr": 0.01, "weight_decay": 0.1},
    "ScheduleFreeAdamW": {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 2},
    "SOAP": {"lr": 0.01, "weight_decay": 0.1, "precondition_frequency": 1},
}
TYPES = {"NorMuon": "Muon", "AdaMuon": "Muon"}
MICROS = 2


class Unknown(AdamW):
    """Of the user's own: nobody says what its arithmetic needs whole."""


def config(kind: str, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": m.MICRO,
        "gradient_accumulation_steps": MICROS,
        "optimizer": {"type": TYPES.get(kind, kind), "params": KINDS.get(kind, {"lr": 0.01})},
        **more,
    }


def refusals() -> dict[str, str]:
    import ds_core
    from ds_core.errors import DSError

    divided = {"tensor_parallel": {"autotp_size": 2}}
    flow = {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "zenflow": {"topk_ratio": 0.2, "update_interval": 2},
    }
    plain = {key: value for key, value in config("", **divided).items() if key != "optimizer"}
    experts = m.divided_experts
    staged = m.pipeline
    cases: dict[str, tuple[Any, dict[str, Any], Any]] = {
        "Muon tp": (m.whole, config("Muon", **divided), None),
        "Lamb tp": (m.whole, config("Lamb", **divided), None),
        "Lion tp": (m.whole, config("Lion", **divided), None),
        "ZenFlow tp": (m.whole, config("AdamW", zero_optimization=flow, **divided), None),
        "Muon tp zero3": (m.whole, config("Muon", zero_optimization={"stage": 3}, **divided), None),
        "unknown tp": (m.whole, plain, lambda groups: Unknown(groups)),
        "function tp": (m.whole, plain, lambda groups: AdamW(groups)),
        "Lamb ep": (experts, config("Lamb"), None),
        "ZenFlow ep": (experts, config("AdamW", zero_optimization=flow), None),
        "OneBitLamb ep": (experts, config("OneBitLamb"), None),
        "OneBitAdam ep": (experts, config("OneBitAdam"), None),
        "OneBitLamb pp": (staged, config("OneBitLamb"), None),
        "unknown dp": (
            m.whole,
            {k: v for k, v in plain.items() if k != "tensor_parallel"},
            Unknown,
        ),
    }
    said = {}
    for name, (make, settings, optimizer) in cases.items():
        try:
            engine, *_ = ds_core.initialize(
                model=make().double(), config=settings, optimizer=optimizer
            )
        except DSError as error:
            said[name] = str(error)
        else:
            engine.destroy()
            said[name] = ""
    return said


def test_what_would_take_a_part_for_the_whole_is_refused_by_all_ranks() -> None:
    first, second = run_ranks(2, refusals)
    assert first == second
    taken = {name for name, why in first.items() if not why}
    whole = {"Muon tp", "Lamb tp", "Muon tp zero3", "Lamb ep"}
    whole |= {"OneBitLamb ep", "OneBitLamb pp"}
    assert taken == whole | {"Lion tp", "function tp", "OneBitAdam ep", "unknown dp"}, first
    for name, why in first.items():
        if why:
            axis = name.split()[1]
            key = "zenflow" if "ZenFlow" in name else "optimizer"
            assert key in why and f"along {axis} 2 of " in why, why
            assert "parallel" in why.replace("pipeline", "parallel"), why


def pipelined(kind: str, stage: int, clip: float) -> float:
    """How far three steps in two stages are from one process."""
    import torch
    from ds_testing.truth import relative

    import ds_core

    settings = config(kind, gradient_clipping=clip, zero_optimization={"stage": stage})
    engine, *_ = ds_core.initialize(model=m.pipeline().double(), config=settings)
    ranks = engine.ctx.mesh.size("dp")
    index = engine.ctx.mesh.index("dp")
    truth = m.undivided().double()
    groups = [{"params": list(truth.parameters())}]
    optimizer = made(TYPES.get(kind, kind), groups, truth, **KINDS[kind])
    for step in range(3):
        engine.train_batch(iter([m.pipe_batch(step, micro, index) for micro in range(MICROS)]))
        optimizer.zero_grad()
        for micro in range(MICROS):
            for place in range(ranks):
                inputs, labels = m.pipe_batch(step, micro, place)
                (truth(inputs, labels) / (MICROS * ranks)).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(truth.parameters(), clip)
        optimizer.step()
    from ds_access import safe_get_full_fp32_param

    wanted = {n: p.detach() for n, p in truth.named_parameters()}
    mine = {n: safe_get_full_fp32_param(p) for n, p in engine.module.named_parameters()}
    engine.destroy()
    return max(relative(value, wanted[name]) for name, value in mine.items())


SAMPLE = [("Muon", 2, 1, 0.3), ("Lamb", 2, 0, 0.3), ("Lamb", 4, 1, 0.3)]
ALL = [
    (k, world, stage, clip)
    for k in KINDS
    for world in (2, 4)
    for stage in range(4)
    for clip in (0.0, 0.3)
]


@pytest.mark.fast_cases("Lamb-2-0-0.3", "Lamb-4-1-0.3")
@pytest.mark.parametrize(
    ("kind", "world", "stage", "clip"),
    [*SAMPLE, *(pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in SAMPLE)],
)
def test_whole_layers_on_stages(kind: str, world: int, stage: int, clip: float) -> None:
    assert max(run_ranks(world, pipelined, kind, stage, clip)) <= 1e-10


def drift(make: str, more: dict[str, Any]) -> dict[str, float]:
    """The sum of each weight that other ranks may hold too, some steps after the freeze."""
    from ds_run_state.slices import SLICES

    import ds_core

    settings = config("OneBitAdam", **more)
    settings["optimizer"]["params"] = {"lr": 0.001, "freeze_step": 2}
    engine, *_ = ds_core.initialize(model=getattr(m, make)().double(), config=settings)
    place = engine.ctx.mesh.index("dp")
    for step in range(6):
        if make == "pipeline":
            engine.train_batch(iter([m.pipe_batch(step, micro, place) for micro in range(MICROS)]))
            continue
        for micro in range(MICROS):
            engine.backward(engine(**m.batch(step, micro, place)))
            engine.step()
    cut = engine.ctx.stash.get(SLICES) or {}
    found = {
        n: float(p.detach().sum()) for n, p in engine.module.named_parameters() if n not in cut
    }
    engine.destroy()
    return found


@pytest.mark.parametrize(
    ("make", "world", "more"),
    [
        ("divided_experts", 2, {}),
        pytest.param("divided_experts", 4, {}, marks=pytest.mark.slow),
        pytest.param("pipeline", 4, {}, marks=pytest.mark.slow),
        pytest.param("whole", 4, {"tensor_parallel": {"autotp_size": 2}}, marks=pytest.mark.slow),
    ],
)
def test_one_bit_adam_keeps_equal_weights_equal(
    make: str, world: int, more: dict[str, Any]
) -> None:
    ranks = run_ranks(world, drift, make, more)
    for name in {name for found in ranks for name in found}:
        values = [found[name] for found in ranks if name in found]
        assert len(values) > 1 and len(set(values)) == 1, f"{name}: {values}"


def another_layout(folder: str, first: int, then: int) -> int:
    """One-bit Adam saved in so many stages, resumed in others."""
    import torch
    from ds_pipeline import LayerSpec, PipelineModule
    from torch import nn

    import ds_core

    def made(stages: int) -> Any:
        torch.manual_seed(0)
        layers = [LayerSpec(nn.Linear, 20, 20) for _ in range(4)]
        model = PipelineModule(
            layers, num_stages=stages, loss_fn=nn.functional.mse_loss, partition_method="uniform"
        )
        settings = config("OneBitAdam", gradient_accumulation_steps=1)
        settings["optimizer"]["params"] = {"lr": 1e-3, "freeze_step": 2}
        return ds_core.initialize(model=model, config=settings)[0]

    x = torch.arange(40.0).view(2, 20) / 40
    engine = made(first)
    for _ in range(4):
        engine.train_batch(iter([(x, x)]))
    engine.save_checkpoint(folder)
    engine.destroy()
    engine = made(then)
    engine.load_checkpoint(folder)
    kept = len(engine.optimizer.rank_state_dict())
    loss = float(engine.train_batch(iter([(x, x)])))
    engine.destroy()
    assert loss == loss
    return kept


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (2, 1),
        pytest.param(1, 2, marks=pytest.mark.slow),
        pytest.param(2, 2, marks=pytest.mark.slow),
    ],
)
def test_errors_of_compression_stay_in_their_layout(first: int, then: int, tmp_path: Path) -> None:
    kept = run_ranks(4, another_layout, str(tmp_path), first, then)
    assert all(count > 0 for count in kept) if first == then else kept == [0] * 4
