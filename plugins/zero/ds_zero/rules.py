"""Rules over ``zero_optimization`` that need other keys or other plugins (torch-free)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ds_core.errors import Problem
from ds_core.stores import check_store

if TYPE_CHECKING:
    from ds_core.plugins import Plugins
    from ds_zero.config import ZeroConfig

__all__ = ["offload_problems"]

OPTIMIZER, PARAM = "zero_optimization.offload_optimizer", "zero_optimization.offload_param"


def offload_problems(section: ZeroConfig, plugins: Plugins) -> Iterator[Problem]:
    """What is wrong with the offload that the section asks for."""
    stage = section.stage
    if (weights := section.offload_param) is not None and weights.on:
        if stage != 3:
            yield Problem(
                f"{PARAM}.device", f"only stage 3 partitions weights, this is stage {stage}", 'set stage 3, or "none"'
            )
        if (problem := check_store(plugins, weights.device, f"{PARAM}.device")) is not None:
            yield problem
    if (states := section.offload_optimizer) is not None and states.on:
        if stage == 0:
            yield Problem(f"{OPTIMIZER}.device", "stage 0 partitions nothing", 'set stage 1, 2 or 3, or "none"')
        elif states.device.lower() == "nvme" and stage != 3:
            yield Problem(
                f"{OPTIMIZER}.device", f"'nvme' needs stage 3, this is stage {stage}", 'set stage 3, or "cpu"'
            )
        if states.ratio < 1 and stage != 3:
            yield Problem(
                f"{OPTIMIZER}.ratio", f"{states.ratio} needs stage 3, this is stage {stage}", "set stage 3, or ratio 1"
            )
        if (problem := check_store(plugins, states.device, f"{OPTIMIZER}.device")) is not None:
            yield problem
