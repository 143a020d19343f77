"""What dscore-zero offers to ds_core: section ``zero_optimization``, its partitioner, its plans
(torch-free).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Axis, Ref

if TYPE_CHECKING:
    from pydantic import BaseModel
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.errors import Problem
    from ds_core.partition import Partitioner
    from ds_core.plugins import Plugins


def ds_config() -> Mapping[str, type[BaseModel]]:
    """The section ``zero_optimization``, and two switches beside it."""
    from ds_zero.config import AllowUntestedOptimizer, ForceOwnOptimizer, ZeroConfig

    return {
        "zero_optimization": ZeroConfig,
        "zero_allow_untested_optimizer": AllowUntestedOptimizer,
        "zero_force_ds_cpu_optimizer": ForceOwnOptimizer,
    }


def ds_planners() -> Mapping[str, Ref]:
    """Every stage and offload, for ``dscore plan``."""
    return {"zero": "ds_zero.planning.planner:ZeroPlanner"}


def ds_compile_passes() -> Mapping[str, str]:
    """``z1`` and ``z3``, which need a stage and change no graph."""
    return {"z1": "ds_zero.compile_passes:z1", "z3": "ds_zero.compile_passes:z3"}


def ds_check(config: RunConfig, plugins: Plugins) -> Iterable[Problem]:
    """What the stage does not support, unknown stores, and optimizers that reduce gradients
    themselves.
    """
    from ds_zero.config import ZeroConfig
    from ds_zero.rules import problems

    section = config.section(ZeroConfig)
    return () if section is None else problems(section, config, plugins)


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """The blocks of a hierarchy of ranks, where the config asks: see `ds_zero.comm.hierarchy`."""
    from ds_zero.config import ZeroConfig

    section = config.section(ZeroConfig)
    if section is None:
        return []
    hpz = section.zero_hpz_partition_size
    mics = section.mics_shard_size
    wanted = [("hpz", hpz)] * (hpz > 1) + [("mics", mics)] * (mics > 0)
    return [Axis(name, size, inside="dp", outermost=True) for name, size in wanted]


def ds_engine_methods() -> Mapping[str, Ref]:
    """What moves the states of stage 3 between device and host; in other stages an error names
    stage 3.
    """
    return {
        name: f"ds_zero.offload.offload_states:{name}"
        for name in ("offload_states", "reload_states")
    }


def ds_memory(
    config: RunConfig, plugins: Plugins, module: nn.Module, world: int
) -> Mapping[str, float]:
    """What ``dscore plan`` says of the config's own stage and offload."""
    from ds_zero.config import ZeroConfig
    from ds_zero.planning.planner import memory

    section = config.section(ZeroConfig)
    return memory(config, plugins, section if section is not None else ZeroConfig(), module, world)


def ds_partitioner(ctx: Context) -> Partitioner | None:
    """The partitioner of the config's stage; None for stage 0."""
    from ds_zero.config import ZeroConfig

    section = ctx.config.section(ZeroConfig)
    if section is None:
        return None
    if section.stage == 0:
        from ds_zero.gather.module_hooks import materialize

        if ctx.module is not None:
            materialize(ctx.module)  # it may have been built under ds_zero.Init
        return None
    if section.stage == 3:
        from ds_zero.stage3 import Stage3

        return Stage3(ctx, section)
    from ds_zero.stage12 import Stage12

    return Stage12(ctx, section)
