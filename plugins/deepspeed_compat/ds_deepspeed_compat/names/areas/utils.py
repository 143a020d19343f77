"""``deepspeed.utils``."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_SAFE: Rows = {
    "safe_get_full_fp32_param safe_get_full_grad safe_get_full_optimizer_state "
    "safe_set_full_fp32_param "
    "safe_set_full_grad safe_set_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_grad "
    "safe_get_local_optimizer_state safe_set_local_fp32_param safe_set_local_grad "
    "safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized": "ds_access",
    "fragment_address": "ds_deepspeed_compat.utils.tensor_helpers",
    "tensor_fragment get_full_hp_param get_hp_fragment_mapping": missing(
        "safe_get_full_fp32_param"
    ),
}
_LEAVES: Rows = {
    "set_z3_leaf_module set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix "
    "unset_z3_leaf_modules get_z3_leaf_modules z3_leaf_module z3_leaf_parameter": "ds_zero",
}
_LOGS: Rows = {
    "logger log_dist log_dist_once set_log_level_from_string": "ds_deepspeed_compat.utils.logs",
}

NAMES: Mapping[str, Rows] = {
    "deepspeed.utils deepspeed.utils.tensor_fragment": _SAFE,
    "deepspeed.utils deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils deepspeed.utils.logging": _LOGS,
    "deepspeed.utils": {
        "RepeatingLoader": "ds_core",
        "OnDevice": "ds_deepspeed_compat.utils.devices",
        "instrument_w_nvtx": "ds_deepspeed_compat.utils.helpers",
        "init_distributed": "ds_core",
    },
    "deepspeed.utils.logging": {
        "LoggerFactory log_levels warning_once print_dist print_json_dist print_configuration "
        "get_current_level "
        "should_log_le get_log_level_from_string": "ds_deepspeed_compat.utils.logs",
    },
    "deepspeed.utils.module_utils": {
        "recursive_getattr recursive_setattr": "ds_deepspeed_compat.utils.module_paths"
    },
    "deepspeed.utils.types": {"ActivationFuncType NormType": "ds_deepspeed_compat.utils.enums"},
    "deepspeed.utils.bwc": {
        "bwc_tensor_model_parallel_rank bwc_tensor_model_parallel_world_size "
        "bwc_tensor_model_parallel_group "
        "bwc_pipeline_parallel_world_size bwc_pipeline_parallel_group": "ds_deepspeed_compat.utils.bwc",
    },
    "deepspeed.utils.debug": {
        "debug_clear_module_and_param_names debug_extract_module_and_param_names debug_module2name "
        "debug_module2name_id debug_module2name_class debug_param2name debug_param2name_id "
        "debug_param2name_id_shape "
        "debug_param2name_id_shape_device debug_param2name_id_numel "
        "debug_param2name_id_shape_status "
        "debug_module2class print_rank print_rank0": "ds_deepspeed_compat.utils.debug_names",
    },
    "deepspeed.utils.init_on_device": {"OnDevice": "ds_deepspeed_compat.utils.devices"},
    "deepspeed.utils.nvtx": {"instrument_w_nvtx": "ds_deepspeed_compat.utils.helpers"},
    "deepspeed.utils.distributed": {"init_distributed": "ds_core"},
    "deepspeed.utils.exceptions": {"DeprecatedException": "ds_core.errors:UsageError"},
    "deepspeed.utils.torch": {"required_torch_version": "ds_deepspeed_compat.utils.helpers"},
    "deepspeed.utils.timer": {
        "SynchronizedWallClockTimer ThroughputTimer NoopTimer "
        "trim_mean": "ds_deepspeed_compat.utils.timers",
    },
    "deepspeed.utils.comms_logging": {
        "CommsLogger": differs(
            "ds_comms_logger.deepspeed_names", "each instance shows the log of the section"
        ),
        "convert_size calc_bw_log get_caller_func": "ds_comms_logger.comms_text",
    },
    "deepspeed.utils.groups": {
        "initialize": missing("initialize(mpu=...) of ds_core; the engine's mesh has the groups"),
        "get_data_parallel_group get_data_parallel_world_size get_data_parallel_rank "
        "get_model_parallel_group "
        "get_model_parallel_world_size get_model_parallel_rank get_tensor_model_parallel_group "
        "get_tensor_model_parallel_world_size get_tensor_model_parallel_rank "
        "get_tensor_model_parallel_src_rank "
        "_get_data_parallel_group _get_data_parallel_world_size _get_data_parallel_rank "
        "_get_data_parallel_group_ranks "
        "_get_model_parallel_world_size _get_sequence_parallel_group "
        "_get_sequence_parallel_world_size "
        "_get_sequence_parallel_rank _get_sequence_data_parallel_group "
        "_get_sequence_data_parallel_world_size "
        "_get_sequence_data_parallel_rank _get_expert_parallel_group "
        "_get_expert_parallel_world_size "
        "_get_expert_parallel_rank _get_expert_parallel_group_ranks "
        "_get_expert_data_parallel_group "
        "_get_expert_data_parallel_world_size _get_expert_data_parallel_rank "
        "_get_expert_data_parallel_group_ranks "
        "_get_max_expert_size _get_max_expert_size_name _get_max_expert_parallel_group "
        "_get_zero_param_intra_parallel_group _zero_param_parallel_is_initialized "
        "_get_zero_param_intra_parallel_group_world_size "
        "_get_broadcast_src_rank _clone_world_group": differs(
            "ds_deepspeed_compat.utils.groups",
            "answered from the mesh of the latest live engine; before initialize an error",
        ),
    },
}
