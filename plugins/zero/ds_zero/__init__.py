"""ZeRO for ds_core: model states partitioned over the ranks that would hold the same ones.

``import ds_zero`` loads no torch; names load on first use (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ds_core import names_on_first_use

if TYPE_CHECKING:
    from ds_zero.external import register_external_parameter, unregister_external_parameter
    from ds_zero.gathered_parameters import (
        GatheredParameters,
        empty_partition_cache,
        is_zero_param,
        unwrap_model_for_generation,
    )
    from ds_zero.init_context import Init, MiCS_Init
    from ds_zero.leaves import (
        get_z3_leaf_modules,
        set_z3_leaf_module,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
        unset_z3_leaf_modules,
        z3_leaf_module,
        z3_leaf_parameter,
    )
    from ds_zero.offload_states import get_state_devices
    from ds_zero.state_offload import OffloadDeviceEnum, OffloadStateTypeEnum
    from ds_zero.status import ZeroParamStatus
    from ds_zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "MiCS_Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "TiledLinearReturnBias",
    "ZeroParamStatus",
    "empty_partition_cache",
    "get_state_devices",
    "get_z3_leaf_modules",
    "is_zero_param",
    "register_external_parameter",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "set_z3_leaf_modules_by_name",
    "set_z3_leaf_modules_by_suffix",
    "unregister_external_parameter",
    "unset_z3_leaf_modules",
    "unwrap_model_for_generation",
    "z3_leaf_module",
    "z3_leaf_parameter",
]

__getattr__, __dir__ = names_on_first_use(
    __name__,
    {
        "init_context": "Init MiCS_Init",
        "external": "register_external_parameter unregister_external_parameter",
        "gathered_parameters": "GatheredParameters empty_partition_cache is_zero_param "
        "unwrap_model_for_generation",
        "leaves": (
            "get_z3_leaf_modules set_z3_leaf_module set_z3_leaf_modules "
            "set_z3_leaf_modules_by_name "
            "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module z3_leaf_parameter"
        ),
        "state_offload": "OffloadDeviceEnum OffloadStateTypeEnum",
        "offload_states": "get_state_devices",
        "status": "ZeroParamStatus",
        "tiling": "TiledLinear TiledLinearReturnBias",
    },
)
