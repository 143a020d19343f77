"""Optimizers that look beyond one element, trained in a layout and in one process."""

from __future__ import annotations

import tempfile
from typing import Any

import models as m

KINDS: dict[str, dict[str, Any]] = {
    "Muon": {"lr": 0.01, "weight_decay": 0.1},
    "NorMuon": {"lr": 0.01, "weight_decay": 0.1, "variant": "normuon"},
    "AdaMuon": {"lr": 0.01, "weight_decay": 0.1, "variant": "adamuon"},
    "Lamb": {"lr": 0.01, "weight_decay": 0.1},
    "AdamMini": {"lr": 0.01, "weight_decay": 0.1},
    "ScheduleFreeAdamW": {"lr": 0.01, "weight_decay": 0.1, "warmup_steps": 2},
    "SOAP": {"lr": 0.01, "weight_decay": 0.1, "precondition_frequency": 1},
    "SOAP short": {
        "lr": 0.01,
        "weight_decay": 0.1,
        "precondition_frequency": 1,
        "max_precond_dim": 8,
    },
    "Shampoo": {"lr": 0.01, "weight_decay": 0.1, "precondition_frequency": 2, "damping": 1e-7},
    "Dion": {"lr": 0.01, "weight_decay": 0.1},
    "GaLore": {"lr": 0.01, "weight_decay": 0.1, "rank": 3, "update_proj_gap": 2},
}
MATRICES = ("SOAP", "Shampoo", "Dion", "GaLore")
TYPES = {"NorMuon": "Muon", "AdaMuon": "Muon", "SOAP short": "SOAP"}
MICROS = 2
STEPS = 3
TP = {"tensor_parallel": {"autotp_size": 2}}
SP = {"sequence_parallel": {"size": 2, "inputs": m.INPUTS}}
OFFLOAD: dict[str, dict[str, Any]] = {
    "": {},
    "cpu": {"offload_optimizer": {"device": "cpu"}},
    # The folder of a run is its own, and goes with it.
    "nvme": {"offload_optimizer": {"device": "nvme", "nvme_path": tempfile.gettempdir()}},
}
LAYOUTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "dp": (m.whole, m.whole, {}),
    "spare": (m.spare, m.spare, {}),
    "tp": (m.whole, m.whole, TP),
    "ep": (m.divided_experts, m.experts, {}),
    "ep tp": (m.divided_experts, m.experts, TP),
    "sp": (m.whole, m.whole, SP),
    "experts": (m.experts, m.experts, {}),
}


TOTAL = 4
"""Micro-batches of a step of `half`, over any number of ranks."""


def config(kind: str, stage: int, offload: str, clip: float, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "reduce_bucket_size": 150, **OFFLOAD[offload]}
    return {
        "train_micro_batch_size_per_gpu": m.MICRO,
        "gradient_accumulation_steps": MICROS,
        "gradient_clipping": clip,
        "optimizer": {"type": TYPES.get(kind, kind), "params": KINDS[kind]},
        "zero_optimization": zero,
        **more,
    }


def made(kind: str, groups: list[dict[str, Any]], model: Any, **params: Any) -> Any:
    """The optimizer of that name for a model in one process, of groups as a config's would have."""
    import ds_optimizers
    from ds_optimizer_kit.matrix_optimizer import split_here
    from ds_optimizers.moments.adam_mini import split_stacks
    from ds_optimizers.muon import split_groups

    names = {p: n for n, p in model.named_parameters()}
    splits = {"Muon": split_groups, "AdamMini": split_stacks, **dict.fromkeys(MATRICES, split_here)}
    if kind in splits:
        groups = splits[kind](groups, names, **params)
    return getattr(ds_optimizers, kind)(groups, **params)


def optimizer_of(kind: str, model: Any) -> Any:
    groups = [{"params": list(model.parameters())}]
    return made(TYPES.get(kind, kind), groups, model, **KINDS[kind])


def train_alone(kind: str, make: Any, ranks: int, clip: float, dtype: str, steps: range) -> Any:
    """The model, and its losses, in one process."""
    import torch

    model = make().to(getattr(torch, dtype))
    optimizer = model.optimizer = optimizer_of(kind, model)
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(0.0)
        for micro in range(MICROS):
            for place in range(ranks):
                loss = model(**m.batch(step, micro, place)) / (MICROS * ranks)
                loss.backward()
                losses[-1] += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(
                [p for p in model.parameters() if p.grad is not None], clip
            )
        optimizer.step()
    return model, losses


def trained(
    layout: str, kind: str, stage: int, offload: str, clip: float, dtype: str = "float64"
) -> dict[str, float]:
    """How far a few steps under a layout are from one process."""
    import torch
    from ds_testing.truth import relative, whole_weights

    import ds_core
    from ds_core import comm

    make, single, more = LAYOUTS[layout]
    settings = config(kind, stage, offload, clip, **more)
    engine, *_ = ds_core.initialize(model=make().to(getattr(torch, dtype)), config=settings)
    mesh = engine.ctx.mesh
    ranks = mesh.size("batch")
    losses = []
    for step in range(STEPS):
        losses.append(0.0)
        for micro in range(MICROS):
            loss = engine(**m.batch(step, micro, mesh.index("batch")))
            engine.backward(loss)
            engine.step()
            losses[-1] += loss.item() / MICROS
    everyone = comm.all_gather_json(losses)
    found = whole_weights(engine)
    engine.destroy()
    model, wanted = train_alone(kind, single, ranks, clip, dtype, range(STEPS))
    mean = [sum(row) / len(everyone) for row in zip(*everyone, strict=True)]
    off = {n: relative(found[n], p.detach().double()) for n, p in model.named_parameters()}
    return {
        "loss": max(abs(a - b) / abs(b) for a, b in zip(mean, wanted, strict=True)),
        **off,
    }


def half(
    folder: str, kind: str, layout: str, stage: int, ranks: int, load: bool, offload: str = ""
) -> dict[str, Any]:
    """Two steps and a checkpoint, or the two steps after it: the weights.

    ranks: with batches of their own.
    """
    from ds_testing.truth import whole_weights

    import ds_core

    make, _, more = LAYOUTS[layout]
    settings = config(kind, stage, offload, 0.3, **more)
    settings["gradient_accumulation_steps"] = TOTAL // ranks
    engine, *_ = ds_core.initialize(model=make().double(), config=settings)
    first = engine.ctx.mesh.index("batch") * (TOTAL // ranks)
    if load:
        engine.load_checkpoint(folder)
    for step in (2, 3) if load else (0, 1):
        for micro in range(TOTAL // ranks):
            engine.backward(engine(**m.batch(step, 0, first + micro)))
            engine.step()
    if not load:
        engine.save_checkpoint(folder)
    found = whole_weights(engine)
    engine.destroy()
    return found
