"""What a foreign checkpoint holds, in our terms: pieces of states, and the run's values."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from ds_checkpoint.folder.boxes import moves
from ds_checkpoint.folder.tensorfile import carry
from ds_checkpoint.formats.foreign import GROUP_KEYS
from ds_run_state.slices import Box
from ds_run_state.states import StateTensor
from torch import Tensor

from ds_core.errors import CheckpointError

_OWN_KEYS = {
    "module",
    "buffer_names",
    "optimizer",
    "param_shapes",
    "frozen_param_shapes",
    "shared_params",
    "frozen_param_fragments",
    "lr_scheduler",
    "data_sampler",
    "random_ltd",
    "sparse_tensor_module_names",
    "skipped_steps",
    "global_steps",
    "global_samples",
    "dp_world_size",
    "mp_world_size",
    "ds_config",
    "ds_version",
    "checkpoint_parallel_dimensions",
    "csr_tensor_module_names",
    "ds_checkpoint_info",
    "universal_checkpoint_info",
    "num_experts",
    "ds_autoep_layers",
    "autoep_layers",
    "args",
}


@dataclass(frozen=True, slots=True)
class Part:
    """What one model-parallel rank has."""

    pieces: list[StateTensor]
    # Further name -> first name, of shared weights.
    shared: dict[str, str] = field(default_factory=dict)
    # Weights that are not trained.
    frozen: list[str] = field(default_factory=list)
    # The optimizer's groups, and the trained parameters of each, in their order.
    groups: Sequence[Mapping[str, Any]] = ()
    order: list[list[str]] = field(default_factory=list)
    # The loss scaler's state.
    scaler: dict[str, Any] | None = None
    # What was left out, and why.
    missing: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Foreign:
    """What a foreign checkpoint holds."""

    tag: str
    pieces: list[StateTensor]
    # Further name -> first name, of shared weights.
    shared: dict[str, str]
    # Weights that are not trained.
    frozen: list[str]
    # The run's values and the program's.
    run: dict[str, Any]
    client: dict[str, Any]
    # The class of the optimizer as that program called it.
    optimizer: str | None
    # What could not be read, and why.
    missing: list[str]
    # Per tensor-parallel rank, the pieces of states of which each has another part and nothing
    # says how they were cut; empty without any.
    cut: list[list[StateTensor]] = field(default_factory=list)
    # Whether its names begin with the number of a layer.
    pipeline: bool = False


def whole(name: str, tensor: Tensor) -> StateTensor:
    """A state that is in one piece."""
    return StateTensor(name, tensor.detach(), tuple(tensor.shape), 0, tensor.numel(), (), True)


def narrowed(piece: StateTensor, dtype: torch.dtype | None) -> StateTensor:
    """The same piece in another dtype, cast when it is read: so that a file stays mapped."""
    if dtype is None or piece.tensor.dtype == dtype:
        return piece
    exact = piece.tensor.detach().reshape(-1)
    stand_in = torch.empty(piece.tensor.shape, dtype=dtype, device="meta")

    def read(view: Tensor) -> Tensor:
        begin = view.storage_offset()
        return exact[begin : begin + view.numel()].to(dtype).view(view.shape)

    return dataclasses.replace(piece, tensor=stand_in, read=read)


def put_together(pieces: Iterable[StateTensor]) -> dict[str, Tensor]:
    """Whole states, by name, each out of its pieces; those of one piece are not copied."""
    by_name: dict[str, list[StateTensor]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    return {name: _joined(name, found) for name, found in by_name.items()}


def _joined(name: str, pieces: list[StateTensor]) -> Tensor:
    first = pieces[0]
    count = sum(p.stop - p.start for p in pieces)
    size = first.tensor.new_empty(first.shape, device="meta").numel()
    if count != size or any(p.shape != first.shape for p in pieces):
        raise CheckpointError(
            f"state {name!r} has {size} elements, {count} are stored; copy all files"
        )
    if len(pieces) == 1 and first.box is None:
        return first.values().detach().reshape(first.shape)
    out = torch.empty(size, dtype=first.tensor.dtype)
    for piece in pieces:
        values = piece.values().detach().reshape(-1).contiguous()
        box = piece.box or Box.whole(piece.shape)
        for move in moves(box, (piece.start, piece.stop), Box.whole(piece.shape), (0, size)):
            carry(move, values, out)
    return out.view(first.shape)


def low_precision(model: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of a 16-bit run's weights; None: fp32."""
    config = model.get("ds_config") or {}
    for name, dtype in (
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("fp16", torch.float16),
    ):
        if (config.get(name) or {}).get("enabled") in (True, "true"):
            return dtype
    return None


def run_of(model: Mapping[str, Any], part: Part) -> dict[str, Any]:
    """The run's values in our own terms (`ds_run_state`)."""
    steps = int(model.get("global_steps") or 0)
    gas = (model.get("ds_config") or {}).get("gradient_accumulation_steps")
    schedule = model.get("lr_scheduler")
    return {
        "micro_steps": steps * (gas if isinstance(gas, int) else 1),
        "global_steps": steps,
        "global_samples": int(model.get("global_samples") or 0),
        "skipped_steps": int(model.get("skipped_steps") or 0),
        "scaler": part.scaler,
        "optimizer_groups": [
            {k: group[k] for k in GROUP_KEYS if k in group} for group in part.groups
        ],
        "optimizer_params": part.order,
        "lr_scheduler": dict(schedule) if isinstance(schedule, dict) else None,
        "data": None,
    }


def scaler_of(values: Mapping[str, Any]) -> dict[str, Any] | None:
    """The state of our loss scaler, out of the fields of DeepSpeed's."""
    if "cur_scale" not in values:
        return None
    return {
        "scale": float(values["cur_scale"]),
        "iteration": int(values.get("cur_iter", 0)),
        "last_overflow": int(values.get("last_overflow_iter", -1)),
        "current_hysteresis": int(values.get("cur_hysteresis", values.get("delayed_shift", 1))),
    }


def client_of(model: Mapping[str, Any]) -> dict[str, Any]:
    """What the user gave as ``client_state``."""
    return {k: v for k, v in model.items() if k not in _OWN_KEYS}


def optimizer_of(model: Mapping[str, Any]) -> str:
    """The optimizer's name in the config."""
    named = ((model.get("ds_config") or {}).get("optimizer") or {}).get("type")
    return f"deepspeed:{named or 'unknown'}"
