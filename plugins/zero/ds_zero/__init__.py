"""ZeRO for ds_core: model states partitioned over the ranks that would hold the same ones.

``import ds_zero`` loads no torch; names load on first use (PEP 562).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_zero.access import (
        safe_get_full_fp32_param,
        safe_get_full_grad,
        safe_get_full_optimizer_state,
        safe_get_local_fp32_param,
        safe_get_local_grad,
        safe_get_local_optimizer_state,
        safe_set_full_fp32_param,
        safe_set_full_grad,
        safe_set_full_optimizer_state,
        safe_set_local_fp32_param,
        safe_set_local_grad,
        safe_set_local_optimizer_state,
        safe_update_full_grad_vectorized,
    )
    from ds_zero.construct import Init
    from ds_zero.external import register_external_parameter, unregister_external_parameter
    from ds_zero.gathered import (
        GatheredParameters,
        empty_partition_cache,
        is_zero_param,
        unwrap_model_for_generation,
    )
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
    from ds_zero.moved import OffloadDeviceEnum, OffloadStateTypeEnum
    from ds_zero.offstates import get_state_devices
    from ds_zero.tiling import TiledLinear, TiledLinearReturnBias

__all__ = [
    "GatheredParameters",
    "Init",
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "TiledLinear",
    "TiledLinearReturnBias",
    "empty_partition_cache",
    "get_state_devices",
    "get_z3_leaf_modules",
    "is_zero_param",
    "register_external_parameter",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_get_local_fp32_param",
    "safe_get_local_grad",
    "safe_get_local_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param",
    "safe_set_local_grad",
    "safe_set_local_optimizer_state",
    "safe_update_full_grad_vectorized",
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

_HOME = {
    "GatheredParameters": "gathered",
    "Init": "construct",
    "TiledLinear": "tiling",
    "TiledLinearReturnBias": "tiling",
    "empty_partition_cache": "gathered",
    "is_zero_param": "gathered",
    "register_external_parameter": "external",
    "unregister_external_parameter": "external",
    "unwrap_model_for_generation": "gathered",
    "OffloadDeviceEnum": "moved",
    "OffloadStateTypeEnum": "moved",
    "get_state_devices": "offstates",
    **{name: "access" for name in __all__ if name.startswith("safe_")},
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME.get(name, 'leaves')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
