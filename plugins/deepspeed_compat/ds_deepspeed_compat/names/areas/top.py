"""``deepspeed`` itself, its version, its communication and its accelerator."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

INJECTION = (
    "init_inference with replace_with_kernel_inject knows families by itself, and names "
    "nothing of "
    "its layers"
)
INFERENCE_CONFIG = differs(
    "ds_inference.config", "frozen; dtype is a name such as fp16, groups and mpu are as given"
)
LEGACY_TENSOR_PARALLEL = differs(
    "ds_tensor_parallel.deepspeed_names",
    "training only; initialize merges it with the config, and the dtype switches bf16 or fp16 on",
)

_CONFIG = "checked as a run's config is; setting an attribute changes no run"

NAMES: Mapping[str, Rows] = {
    "deepspeed": {
        "initialize DeepSpeedEngine PipelineEngine": "ds_deepspeed_compat.engines.engine",
        "init_distributed": "ds_core",
        "add_config_arguments": "ds_deepspeed_compat.arguments",
        "init_inference InferenceEngine default_inference_config": "ds_inference",
        "DeepSpeedInferenceConfig": INFERENCE_CONFIG,
        "tp_model_init set_autotp_mode": LEGACY_TENSOR_PARALLEL,
        "DeepSpeedHybridEngine": differs(
            "ds_deepspeed_compat.engines.engine:DeepSpeedEngine",
            "any engine; section hybrid_engine gives it generate",
        ),
        "PipelineModule": "ds_pipeline",
        "DeepSpeedDataLoader": differs(
            "ds_deepspeed_compat.engines.loader",
            "shuffles again in each epoch, and has no worker processes unless told",
        ),
        "DeepSpeedOptimizer ZeROOptimizer": "ds_deepspeed_compat.engines.optimizer",
        "DeepSpeedConfig": differs("ds_deepspeed_compat.configs.deepspeed_config", _CONFIG),
        "DeepSpeedConfigError": "ds_core.errors:ConfigError",
        "DeepSpeedTransformerLayer DeepSpeedTransformerConfig": "ds_ops_cuda.transformer",
        "replace_transformer_layer revert_transformer_layer": missing(INJECTION),
        "module_inject": "deepspeed.module_inject:",
        "get_accelerator": "ds_deepspeed_compat.services.accelerator",
        "log_dist logger": "ds_deepspeed_compat.utils.logs",
        "OnDevice": "ds_deepspeed_compat.utils.devices",
        "dist": "deepspeed.comm:",
        "__version__ version": "ds_deepspeed_compat.version:VERSION",
        "__git_hash__ git_hash": "ds_deepspeed_compat.version:GIT_HASH",
        "__git_branch__ git_branch": "ds_deepspeed_compat.version:GIT_BRANCH",
    },
    "deepspeed.git_version_info": {
        "version": "ds_deepspeed_compat.version:VERSION",
        "git_hash": "ds_deepspeed_compat.version:GIT_HASH",
        "git_branch": "ds_deepspeed_compat.version:GIT_BRANCH",
        "torch_info": "ds_deepspeed_compat.version",
        "installed_ops compatible_ops": "ds_deepspeed_compat.services.op_builder:compatible_ops",
        "accelerator_name": "ds_deepspeed_compat.version",
    },
    "deepspeed.git_version_info_installed": {
        "version": "ds_deepspeed_compat.version:VERSION",
        "git_hash": "ds_deepspeed_compat.version:GIT_HASH",
        "git_branch": "ds_deepspeed_compat.version:GIT_BRANCH",
        "torch_info": "ds_deepspeed_compat.version",
        "installed_ops compatible_ops": "ds_deepspeed_compat.services.op_builder:compatible_ops",
    },
    "deepspeed.constants": {
        "default_pg_timeout": "ds_deepspeed_compat.constants",
    },
    "deepspeed.config": {
        "Config TrainingConfig BatchConfig FP16Config": "ds_deepspeed_compat.configs.config"
    },
    "deepspeed.comm deepspeed.comm.comm": {
        "init_distributed": "ds_core",
        "is_initialized is_available destroy_process_group new_group": "ds_deepspeed_compat.services.comm",
        "get_rank get_world_size get_local_rank get_global_rank get_world_group "
        "get_all_ranks_from_group": ("ds_deepspeed_compat.services.comm"),
        "all_reduce all_gather all_gather_into_tensor allgather_fn reduce_scatter "
        "reduce_scatter_tensor "
        "reduce_scatter_fn reduce broadcast all_to_all all_to_all_single gather scatter barrier "
        "monitored_barrier "
        "send recv isend irecv batch_isend_irecv P2POp": "ds_deepspeed_compat.services.comm",
        "all_reduce_coalesced all_gather_coalesced "
        "inference_all_reduce": "ds_deepspeed_compat.services.comm",
        "has_all_gather_into_tensor has_reduce_scatter_tensor has_all_reduce_coalesced "
        "has_coalescing_manager": ("ds_deepspeed_compat.services.comm"),
        "broadcast_object_list all_gather_object": differs(
            "ds_deepspeed_compat.services.comm",
            "objects travel as JSON: nothing is pickled; anything else is an error",
        ),
        "ReduceOp ProcessGroup": "torch.distributed",
        "TorchBackend": "ds_deepspeed_compat.services.torch_backend",
        "configure log_summary reset_log has_comm_data get_comm_operation_count "
        "get_logged_comm_ops": ("ds_comms_logger.deepspeed_names"),
        "comms_logger": differs(
            "ds_comms_logger.deepspeed_names",
            "shows the log of the section; calls of one size have their average",
        ),
        "mpi_discovery": differs(
            "ds_deepspeed_compat.services.comm",
            "init_distributed finds the job by itself; this only sets the variables",
        ),
        "initialize_mesh_device": missing("mesh_param of initialize; init_device_mesh of torch"),
    },
    "deepspeed.comm.torch": {"TorchBackend": "ds_deepspeed_compat.services.torch_backend"},
    "deepspeed.comm.reduce_op": {"ReduceOp": "torch.distributed"},
    "deepspeed.comm.utils": {},
    "deepspeed.accelerator deepspeed.accelerator.real_accelerator": {
        "get_accelerator set_accelerator "
        "is_current_accelerator_supported": "ds_deepspeed_compat.services.accelerator",
        "DeepSpeedAccelerator": "ds_deepspeed_compat.services.accelerator",
    },
    "deepspeed.accelerator.abstract_accelerator": {
        "DeepSpeedAccelerator": "ds_deepspeed_compat.services.accelerator"
    },
}
