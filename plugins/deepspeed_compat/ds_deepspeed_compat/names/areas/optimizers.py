"""Optimizers and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_ZENFLOW = missing("the section zero_optimization.zenflow, which works with any Adam")
_ONEBIT = "no bias correction is applied; the engine connects by itself (docs/differences.md)"

NAMES: Mapping[str, Rows] = {
    "deepspeed.ops.adam": {
        "DeepSpeedCPUAdam FusedAdam": "ds_optimizers",
        "ZenFlowCPUAdam ZenFlowSelectiveAdamW ZenFlowSelectiveAdamW_stage3": _ZENFLOW,
    },
    "deepspeed.ops.adam.cpu_adam": {"DeepSpeedCPUAdam": "ds_optimizers"},
    "deepspeed.ops.adam.fused_adam": {"FusedAdam": "ds_optimizers"},
    "deepspeed.ops.lamb deepspeed.ops.lamb.fused_lamb": {"FusedLamb": "ds_optimizers"},
    "deepspeed.ops.lion": {"DeepSpeedCPULion FusedLion": "ds_optimizers"},
    "deepspeed.ops.lion.cpu_lion": {"DeepSpeedCPULion": "ds_optimizers"},
    "deepspeed.ops.lion.fused_lion": {"FusedLion": "ds_optimizers"},
    "deepspeed.ops.adagrad deepspeed.ops.adagrad.cpu_adagrad": {
        "DeepSpeedCPUAdagrad": "ds_optimizers"
    },
    "deepspeed.runtime.zero.muon.muon_optimizer": {
        "MuonWithAuxAdam": differs("ds_optimizers:Muon", "one class for both")
    },
    "deepspeed.runtime.fp16.onebit": {
        "OnebitAdam": differs("ds_optimizers:OneBitAdam", _ONEBIT),
        "OnebitLamb": differs("ds_optimizers:OneBitLamb", _ONEBIT),
        "ZeroOneAdam": differs("ds_optimizers", _ONEBIT),
    },
    "deepspeed.runtime.fp16.onebit.adam": {
        "OnebitAdam": differs("ds_optimizers:OneBitAdam", _ONEBIT)
    },
    "deepspeed.runtime.fp16.onebit.lamb": {
        "OnebitLamb": differs("ds_optimizers:OneBitLamb", _ONEBIT)
    },
    "deepspeed.runtime.fp16.onebit.zoadam": {"ZeroOneAdam": differs("ds_optimizers", _ONEBIT)},
    "deepspeed.runtime.lr_schedules": {
        "LRRangeTest OneCycle WarmupLR WarmupDecayLR WarmupCosineLR": "ds_lr_schedules.schedules",
        "add_tuning_arguments": missing("write the schedule into the config"),
    },
}
