"""ZeRO for ds_core: model states partitioned over the ranks that would hold the same ones. Nothing loads torch before
it is used (PEP 562)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.access import (
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
    from ds_zero.offstates import get_state_devices
    from ds_zero.park import OffloadDeviceEnum, OffloadStateTypeEnum

_WHERE = {
    "OffloadDeviceEnum": "ds_zero.park",
    "OffloadStateTypeEnum": "ds_zero.park",
    "get_state_devices": "ds_zero.offstates",
    "safe_get_full_fp32_param": "ds_core.access",
    "safe_get_full_grad": "ds_core.access",
    "safe_get_full_optimizer_state": "ds_core.access",
    "safe_get_local_fp32_param": "ds_core.access",
    "safe_get_local_grad": "ds_core.access",
    "safe_get_local_optimizer_state": "ds_core.access",
    "safe_set_full_fp32_param": "ds_core.access",
    "safe_set_full_grad": "ds_core.access",
    "safe_set_full_optimizer_state": "ds_core.access",
    "safe_set_local_fp32_param": "ds_core.access",
    "safe_set_local_grad": "ds_core.access",
    "safe_set_local_optimizer_state": "ds_core.access",
    "safe_update_full_grad_vectorized": "ds_core.access",
}

__all__ = [
    "OffloadDeviceEnum",
    "OffloadStateTypeEnum",
    "get_state_devices",
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
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'ds_zero' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_WHERE[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
