"""The answer to `ds_memory`: the plan of the config's own stage and offload, on the rank that has
most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ds_core.optim import choose
from ds_core.precision import make_precision
from ds_zero.planning.plan import Offload, PlannedRun, predict

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins
    from ds_core.precision import Precision
    from ds_zero.config import ZeroConfig


def memory(
    config: RunConfig, plugins: Plugins, section: ZeroConfig, module: nn.Module, world: int
) -> Mapping[str, float]:
    """Bytes per rank by place.

    Raises UsageError where ranks do not divide into the config's blocks.
    """
    optimizer, _ = choose("optimizer", config, plugins)
    precision = make_precision(config, plugins)
    like = next((p for p in module.parameters() if p.requires_grad), None)
    states, wide, casts = measured_states(optimizer, precision, like)
    offloaded = section.offload_optimizer
    run = PlannedRun(
        world=world,
        precision=precision,
        states=states,
        gas=config.core.gradient_accumulation_steps or 1,
        casts=casts,
        wide=wide and not config.core.bf16.bf16_optimizer_states,
        ahead=offloaded is not None and offloaded.on and offloaded.super_offload,
    )
    need = predict(module, section, run, offload_of(section))
    return {"device": need.device.peak, "host": need.host.peak, "disk": need.disk}


def offload_of(section: ZeroConfig) -> Offload:
    """The offload that a section asks for; weights are offloaded in stage 3 alone."""
    states = (
        section.offload_optimizer.device.lower()
        if section.offload_optimizer is not None
        else "none"
    )
    weights = section.offload_param.device.lower() if section.offload_param is not None else "none"
    if section.stage == 0 or (states == "none" and (weights == "none" or section.stage < 3)):
        return Offload.NONE
    if section.stage < 3:
        weights = "none"
    if states in ("none", "cpu"):
        return Offload.OPTIMIZER if weights == "none" else Offload.ALL
    return Offload.DISK_ALL if weights not in ("none", "cpu") else Offload.DISK


def measured_states(
    optimizer: Any | None, precision: Precision, like: nn.Parameter | None = None
) -> tuple[int, bool, bool]:
    """`PlannedRun.states`, `wide` and `casts`, measured in a small step of a tensor as the
    optimizer updates it.

    like: a parameter of the model; what is written on it (``infshape``, ``use_muon``) is on the
    tensor too.
    """
    if optimizer is None:
        return 2, False, True
    weight = torch.nn.Parameter(
        torch.zeros(64, 64, dtype=precision.master or precision.param or torch.float32)
    )
    weight.__dict__.update(vars(like) if like is not None else {})
    weight.grad = torch.ones_like(weight)
    made = optimizer.build(optimizer.groups([{"params": [weight]}], {weight: "weight"}))
    made.step()
    kept = [v for v in made.state.get(weight, {}).values() if isinstance(v, torch.Tensor)]
    wide = any(v.shape == weight.shape and v.dtype.itemsize > weight.dtype.itemsize for v in kept)
    return (
        round(sum(v.numel() for v in kept) / weight.numel()),
        wide,
        not getattr(made, "takes_inputs", False),
    )
