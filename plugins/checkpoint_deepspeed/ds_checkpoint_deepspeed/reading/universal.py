"""Universal checkpoints: a folder per parameter, with a file for each of its states, whole.

``zero/<parameter>/{fp32,exp_avg,exp_avg_sq,step}.pt`` hold a tensor, or a dict with it under
``param``; ``zero/optimizer_state.pt`` what all parameters have in common.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_checkpoint_deepspeed.reading.folder import UNIVERSAL, Data, Files, load, module_of
from ds_checkpoint_deepspeed.reading.foreign import (
    Foreign,
    Part,
    client_of,
    low_precision,
    narrowed,
    optimizer_of,
    run_of,
    scaler_of,
    whole,
)
from ds_core.errors import CheckpointError

_COMMON = "optimizer_state.pt"


def read_universal(files: Files, model: dict[str, Any]) -> Foreign:
    """All states, and the run's values; `model`: the file of model states of the first rank."""
    # Ranks of tensor parallelism or of a pipeline have model states of their own.
    models = [model, *(load(path) for path in list(files.models.values())[1:])]
    module = {n: t for m in models for n, t in module_of(m).items()}
    buffers = {n for m in models for n in m.get("buffer_names") or ()}
    frozen = list(model.get("frozen_param_shapes") or ())
    root = files.folder / UNIVERSAL
    folders = sorted(Path(at) for at, _, names in os.walk(root) if "fp32.pt" in names)
    if not folders:
        raise CheckpointError(
            f"{root} has no parameters; was the conversion to a universal checkpoint ended?"
        )
    common = load(root / _COMMON) if (root / _COMMON).is_file() else {}
    # Buffers come from the model states: the conversion has made them fp32.
    stored = {folder.relative_to(root).as_posix(): folder for folder in folders}
    params = {n: f for n, f in stored.items() if n not in buffers or n not in module}
    pieces = _params(params, _shapes(models), frozen, low_precision(model))
    pieces += [whole(f"module/{n}", t) for n, t in module.items() if n in buffers]
    inner = common.get("optimizer_state_dict", common)
    _add_steps(pieces, common, inner)
    order = [list(group) for group in model.get("param_shapes") or ()]
    scaler = scaler_of(vars(common.get("loss_scaler") or Data()))
    shared = {a: n for m in models for a, n in dict(m.get("shared_params") or {}).items()}
    # A shared weight is stored under each of its names; the first one's states are kept.
    pieces = [p for p in pieces if p.name.partition("/")[2] not in shared]
    part = Part(pieces, shared, frozen, inner.get("param_groups") or (), order, scaler)
    run = run_of(model, part)
    optimizer = optimizer_of(model) if part.groups else None
    pipeline = bool(files.layers) or any(m.get("module", 0) is None for m in models)
    return Foreign(
        files.folder.name,
        pieces,
        shared,
        frozen,
        run,
        client_of(model),
        optimizer,
        [],
        pipeline=pipeline,
    )


def _params(
    folders: Mapping[str, Path],
    shapes: Mapping[str, tuple[int, ...]],
    frozen: list[str],
    low: torch.dtype | None,
) -> list[StateTensor]:
    """The states of all parameters; what is not trained has no master."""
    pieces: list[StateTensor] = []
    for name, folder in folders.items():
        found = _param(folder, name, shapes.get(name), low)
        pieces += [p for p in found if name not in frozen or not p.name.startswith("master/")]
    return pieces


def _shapes(models: list[dict[str, Any]]) -> dict[str, tuple[int, ...]]:
    """Of parameters, which stage 3 stores flat; of tensor-parallel ranks, they are of slices."""
    rows = {
        n: tuple(s)
        for m in models
        for group in m.get("param_shapes") or ()
        for n, s in group.items()
    }
    return rows | {
        n: tuple(s) for m in models for n, s in (m.get("frozen_param_shapes") or {}).items()
    }


def _param(
    folder: Path, name: str, shape: tuple[int, ...] | None, low: torch.dtype | None
) -> list[StateTensor]:
    pieces = []
    for path in sorted(folder.glob("*.pt")):
        saved = load(path, kind=(dict, Tensor, int, float))
        value = saved.get("param") if isinstance(saved, Mapping) else saved
        if path.stem == "step" or not isinstance(value, Tensor):
            if isinstance(value, (Tensor, int, float)):
                counter = torch.as_tensor(value, dtype=torch.float32).reshape(-1)[0]
                pieces.append(whole(f"optimizer/{path.stem}/{name}", counter))
            continue
        # Stage 3 stores parameters flat, padded to a multiple of the ranks.
        if value.dim() == 1 and shape is not None and math.prod(shape) <= value.numel():
            value = value[: math.prod(shape)].view(shape)
        if path.stem == "fp32":
            pieces.append(narrowed(whole(f"module/{name}", value), low))
            if low is not None:
                pieces.append(whole(f"master/{name}", value))
        else:
            pieces.append(whole(f"optimizer/{path.stem}/{name}", value))
    return pieces


def _add_steps(
    pieces: list[StateTensor], common: Mapping[str, Any], inner: Mapping[str, Any]
) -> None:
    """The counter that all parameters have in common, where they have none of their own (stage
    3)."""
    states = inner.get("state") if isinstance(inner, Mapping) else None
    first: Mapping[str, Any] = (
        next(iter(states.values()), {}) if isinstance(states, Mapping) else {}
    )
    step = first.get("step", common.get("base_optimizer_state_step"))
    trained = {
        p.name.removeprefix("optimizer/exp_avg/")
        for p in pieces
        if p.name.startswith("optimizer/exp_avg/")
    }
    have = {
        p.name.removeprefix("optimizer/step/")
        for p in pieces
        if p.name.startswith("optimizer/step/")
    }
    if isinstance(step, (Tensor, int, float)):
        counter = torch.as_tensor(step, dtype=torch.float32).reshape(-1)[0]
        pieces += [whole(f"optimizer/step/{name}", counter) for name in sorted(trained - have)]
