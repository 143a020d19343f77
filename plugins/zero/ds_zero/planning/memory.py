"""The answer to `ds_memory`: the plan of the config's own stage and offload, on the rank that has
most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ds_plan import Offload, PlannedRun

from ds_core.precision import make_precision
from ds_core.setup.optim import choose
from ds_zero.planning.predict import predict

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.plugins import Plugins
    from ds_zero.config import OffloadOptimizer, OffloadParam, ZeroConfig


def memory(
    config: RunConfig, plugins: Plugins, section: ZeroConfig, module: nn.Module, world: int
) -> Mapping[str, float]:
    """Bytes per rank by place.

    Raises UsageError where ranks do not divide into the config's blocks.
    """
    optimizer, _ = choose("optimizer", config, plugins)
    precision = make_precision(config, plugins)
    run = PlannedRun.of(config, optimizer, precision, module, world)
    need = predict(module, section, run, offload_of(section))
    return {"device": need.device.peak, "host": need.host.peak, "disk": need.disk}


def offload_of(section: ZeroConfig) -> Offload:
    """The offload that a section asks for; weights are offloaded in stage 3 alone."""
    states = _device(section.offload_optimizer)
    weights = _device(section.weights_offload)
    if section.stage == 0 or (states == "none" and weights == "none"):
        return Offload.NONE
    # Weights are never offloaded without the optimizer's states.
    if states in ("none", "cpu"):
        return Offload.OPTIMIZER if weights == "none" else Offload.ALL
    return Offload.DISK_ALL if weights not in ("none", "cpu") else Offload.DISK


def _device(place: OffloadOptimizer | OffloadParam | None) -> str:
    return "none" if place is None else place.device.lower()
