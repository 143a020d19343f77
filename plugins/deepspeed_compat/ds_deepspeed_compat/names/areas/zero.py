"""``deepspeed.zero`` and the modules of ``deepspeed.runtime.zero``."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_MICS = missing(
    "the keys mics_shard_size and zero_hpz_partition_size; there is one optimizer for all stages"
)
_OPTIMIZER = "ds_deepspeed_compat.engines.optimizer"
_CONSTRUCTORS = "tensor empty zeros ones full arange eye randn"

NAMES: Mapping[str, Rows] = {
    "deepspeed.zero deepspeed.runtime.zero": {
        "Init GatheredParameters register_external_parameter unregister_external_parameter "
        "ZeroParamStatus "
        "TiledLinear TiledLinearReturnBias unwrap_model_for_generation MiCS_Init": "ds_zero",
        "ZeroParamType": "ds_deepspeed_compat.utils.enums",
        "MiCS_Optimizer": _MICS,
        "DeepSpeedZeRoOffload": missing("offload_param and offload_optimizer of the config"),
    },
    "deepspeed.runtime.zero.partition_parameters": {
        "Init GatheredParameters register_external_parameter unregister_external_parameter "
        "ZeroParamStatus": "ds_zero",
        "ZeroParamType": "ds_deepspeed_compat.utils.enums",
        "zero_wrapper_for_fp_tensor_constructor": differs(
            "ds_deepspeed_compat.utils.helpers",
            "Init leaves torch's constructors alone: one put in its place is not called",
        ),
        **{f"_orig_torch_{name}": f"torch:{name}" for name in _CONSTRUCTORS.split()},
        "get_accelerator": "ds_deepspeed_compat.services.accelerator",
    },
    "deepspeed.runtime.zero.mics": {"MiCS_Init": "ds_zero", "MiCS_Optimizer MiCS_Offload": _MICS},
    "deepspeed.runtime.zero.tiling": {"TiledLinear TiledLinearReturnBias": "ds_zero"},
    "deepspeed.runtime.zero.linear": {
        "LinearModuleForZeroStage3": differs(
            "torch.nn:Linear", "no linear keeps a gathered weight for backward"
        ),
        "zero3_linear_wrap": differs(
            "torch.nn.functional:linear", "no linear keeps a gathered weight for backward"
        ),
    },
    "deepspeed.runtime.zero.utils": {
        "is_zero_param": "ds_zero",
        "ZeRORuntimeException": "ds_core.errors:UsageError",
        "is_zero_supported_optimizer": differs(
            "ds_deepspeed_compat.utils.helpers",
            "every optimizer is supported: true for any torch optimizer",
        ),
    },
    "deepspeed.runtime.zero.config": {
        "DeepSpeedZeroConfig get_zero_config": "ds_deepspeed_compat.configs.config_models",
        "DeepSpeedZeroLeafModuleConfig": "ds_deepspeed_compat.configs.config_models",
        "ZeroStageEnum": "ds_deepspeed_compat.utils.enums",
    },
    "deepspeed.runtime.zero.offload_config": {"OffloadStateTypeEnum": "ds_zero"},
    "deepspeed.runtime.zero.config deepspeed.runtime.zero.offload_config": {
        "OffloadDeviceEnum": "ds_zero",
        "DeepSpeedZeroOffloadParamConfig "
        "DeepSpeedZeroOffloadOptimizerConfig": "ds_deepspeed_compat.configs.config_models",
    },
    "deepspeed.runtime.zero.leaf_module_config": {
        "DeepSpeedZeroLeafModuleConfig": "ds_deepspeed_compat.configs.config_models",
    },
    "deepspeed.runtime.zero.offload_states": {
        "get_state_devices": "ds_zero",
        "offload_adam_states reload_adam_states": missing(
            "engine.offload_states and engine.reload_states"
        ),
    },
    "deepspeed.runtime.zero.stage_1_and_2": {
        "estimate_zero2_model_states_mem_needs estimate_zero2_model_states_mem_needs_all_live "
        "estimate_zero2_model_states_mem_needs_all_cold": "ds_zero.planning.estimators",
        "DeepSpeedZeroOptimizer": _OPTIMIZER,
    },
    "deepspeed.runtime.zero.stage3": {
        "estimate_zero3_model_states_mem_needs estimate_zero3_model_states_mem_needs_all_live "
        "estimate_zero3_model_states_mem_needs_all_cold": "ds_zero.planning.estimators",
        "unwrap_model_for_generation": "ds_zero",
        "DeepSpeedZeroOptimizer_Stage3": _OPTIMIZER,
    },
    "deepspeed.runtime.zero.parameter_offload": {
        "DeepSpeedZeRoOffload": missing("offload_param and offload_optimizer of the config"),
    },
    "deepspeed.runtime.zenflow.zenflow_config": {
        "ZenFlowConfig": "ds_deepspeed_compat.configs.config_models"
    },
    "deepspeed.runtime.swap_tensor": {},
}
