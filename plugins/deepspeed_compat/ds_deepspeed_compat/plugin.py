"""Declaration: a command, the engine's methods under DeepSpeed's names, a mesh of an `mpu`
(torch-free).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from ds_core.entries import CommandEntry, Ref

if TYPE_CHECKING:
    from ds_command_kit.run_options import RunOption
    from torch import nn

    from ds_core.context import Context
    from ds_core.mesh import Mesh


def ds_commands() -> Mapping[str, CommandEntry]:
    """``dscore config migrate``."""
    help_line = (
        "Say what becomes of each key of a DeepSpeed config, and write the config as "
        "ds_core "
        "wants it."
    )
    return {
        "config migrate": CommandEntry("ds_deepspeed_compat.configs.migration:migrate", help_line)
    }


def ds_run_options() -> Mapping[str, RunOption]:
    """``dscore run --as-deepspeed``."""
    from ds_command_kit.run_options import RunOption

    text = "`import deepspeed` in the script gives ds_core."
    return {
        "--as-deepspeed": RunOption(
            "ds_deepspeed_compat.finder:as_deepspeed", text, panel="DeepSpeed"
        )
    }


def ds_engine_methods() -> Mapping[str, Ref]:
    """All of `ds_deepspeed_compat.engines.engine_methods`, and the getters of
    `ds_deepspeed_compat.engines.engine_getters`.
    """
    from ds_deepspeed_compat.engines import engine_getters, engine_methods

    modules = {engine_getters: engine_getters.CONFIG_KEYS, engine_methods: engine_methods.__all__}
    return {
        name: f"{module.__name__}:{name}" for module, names in modules.items() for name in names
    }


def ds_mesh(mpu: Any, rank: int, world_size: int) -> Mesh | None:
    """The data and model groups of `mpu`; None where it has none of Megatron's getters."""
    from ds_deepspeed_compat.engines.mpu import MpuMesh, knows

    return MpuMesh(mpu, rank, world_size) if knows(mpu) else None


def ds_param_axes(param: nn.Parameter, ctx: Context) -> Collection[str]:
    """``tp`` for parameters with a true attribute: the convention of models that come with an
    `mpu`.
    """
    sliced = getattr(param, "tensor_model_parallel", False) or getattr(
        param, "model_parallel", False
    )
    return ("tp",) if sliced and ctx.mesh.has("tp") else ()
