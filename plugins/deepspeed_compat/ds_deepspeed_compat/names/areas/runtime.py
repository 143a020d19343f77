"""``deepspeed.runtime``: the engine, its config, precision, loader and helpers."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_CONFIG = "checked as a run's config is; setting an attribute changes no run"

NAMES: Mapping[str, Rows] = {
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine DeepSpeedOptimizerCallable "
        "DeepSpeedSchedulerCallable": "ds_deepspeed_compat.engines.engine",
    },
    "deepspeed.runtime.hybrid_engine": {
        "DeepSpeedHybridEngine": differs(
            "ds_deepspeed_compat.engines.engine:DeepSpeedEngine",
            "any engine; section hybrid_engine gives it generate",
        ),
    },
    "deepspeed.runtime.config": {
        "DeepSpeedConfig": differs("ds_deepspeed_compat.configs.deepspeed_config", _CONFIG),
        "DeepSpeedConfigModel get_bfloat16_config get_float16_config get_zero_config "
        "get_scalar_param "
        "HybridEngineConfig CompileConfig": ("ds_deepspeed_compat.configs.config_models"),
        "DeepSpeedActivationCheckpointingConfig DeepSpeedFlopsProfilerConfig "
        "DeepSpeedAutotuningConfig "
        "DeepSpeedCommsConfig get_monitor_config get_timers_config get_aio_config": (
            "ds_deepspeed_compat.configs.section_defaults"
        ),
        "ZeroStageEnum DtypeEnum": "ds_deepspeed_compat.utils.enums",
        "get_gradient_accumulation_steps get_managed_gradient_accumulation get_prescale_gradients "
        "get_gradient_predivide_factor get_gradient_allreduce_op get_steps_per_print "
        "get_disable_allgather "
        "get_dump_state get_disable_python_gc get_gradient_clipping "
        "get_zero_allow_untested_optimizer "
        "get_zero_force_ds_cpu_optimizer get_train_batch_size get_train_micro_batch_size_per_gpu "
        "get_wall_clock_breakdown get_memory_breakdown get_dataloader_drop_last get_log_level "
        "get_optimizer_name "
        "get_optimizer_params get_optimizer_legacy_fusion get_optimizer_gradient_clipping "
        "get_scheduler_name "
        "get_scheduler_params get_torch_autocast_enabled get_lower_precision_safe_modules "
        "get_checkpoint_params "
        "get_data_types_params get_checkpoint_tag_validation_mode get_communication_data_type": (
            "ds_deepspeed_compat.configs.config_readers"
        ),
        "dict_raise_error_on_duplicate_keys": "ds_deepspeed_compat.files",
        "DeepSpeedConfigError": "ds_core.errors:ConfigError",
    },
    "deepspeed.runtime.config_utils": {
        "DeepSpeedConfigModel": "ds_deepspeed_compat.configs.config_models",
        "get_scalar_param get_list_param "
        "get_dict_param": "ds_deepspeed_compat.configs.config_models:get_scalar_param",
        "dict_raise_error_on_duplicate_keys": "ds_deepspeed_compat.files",
    },
    "deepspeed.runtime.precision_config": {
        "DeepSpeedFP16Config DeepSpeedBF16Config get_float16_config get_bfloat16_config": (
            "ds_deepspeed_compat.configs.config_models"
        ),
    },
    "deepspeed.runtime.activation_checkpointing.config": {
        "DeepSpeedActivationCheckpointingConfig": "ds_deepspeed_compat.configs.section_defaults",
    },
    "deepspeed.runtime.swap_tensor.aio_config": {
        "get_aio_config AIO_DEFAULT_DICT": "ds_deepspeed_compat.configs.section_defaults",
    },
    "deepspeed.runtime.base_optimizer": {
        "DeepSpeedOptimizer ZeROOptimizer": "ds_deepspeed_compat.engines.optimizer"
    },
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "ds_deepspeed_compat.engines.optimizer"},
    "deepspeed.runtime.fp16.fused_optimizer": {
        "FP16_Optimizer": "ds_deepspeed_compat.engines.optimizer"
    },
    "deepspeed.runtime.fp16.unfused_optimizer": {
        "FP16_UnfusedOptimizer": "ds_deepspeed_compat.engines.optimizer"
    },
    "deepspeed.runtime.fp16.loss_scaler": {
        "LossScalerBase LossScaler DynamicLossScaler CreateLossScaler to_python_float": (
            "ds_deepspeed_compat.engines.loss_scaler"
        ),
        "has_inf_or_nan": "ds_deepspeed_compat.utils.norms",
        "LossScaleConfig LossScaleProfile": missing(
            "section fp16 of the config makes the engine's loss scale"
        ),
    },
    "deepspeed.runtime.dataloader": {
        "RepeatingLoader": "ds_core",
        "DeepSpeedDataLoader": differs(
            "ds_deepspeed_compat.engines.loader",
            "shuffles again in each epoch, and has no worker processes unless told",
        ),
    },
    "deepspeed.runtime.torch_autocast": {
        "init_autocast_params is_autocast_initialized "
        "get_default_autocast_lower_precision_modules": "ds_deepspeed_compat.engines.autocast",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing deepspeed.checkpointing": {
        "configure is_configured checkpoint non_reentrant_checkpoint reset get_cuda_rng_tracker "
        "CudaRNGStatesTracker model_parallel_cuda_manual_seed": "ds_activation_checkpointing",
        "partition_activations_in_checkpoint "
        "set_num_layers": "ds_activation_checkpointing.deepspeed.checkpointing",
        "model_parallel_reconfigure_tp_seed "
        "_set_cuda_rng_state": "ds_activation_checkpointing.deepspeed.random_tracker",
        "_CUDA_RNG_STATE_TRACKER": "ds_activation_checkpointing.deepspeed.random_tracker:_TRACKER",
        "_MODEL_PARALLEL_RNG_TRACKER_NAME": "ds_run_state.random_streams:MODEL_PARALLEL",
        "detach_variable extract_tensors "
        "merge_tensors": "ds_activation_checkpointing.deepspeed.names",
        "partition_activations gather_partitioned_activations get_partition_size "
        "get_partition_start": missing(
            "partition_activations of the section, or configure(mpu, partition_activations=True), "
            "divides and gathers"
        ),
        "CheckpointFunction": differs(
            "ds_activation_checkpointing",
            "has apply(function, outputs, *args), and is no torch.autograd.Function",
        ),
    },
    "deepspeed.runtime.utils": {
        "see_memory_usage memory_status empty_cache set_random_seed move_to_device copy_to_device "
        "ensure_directory_exists noop_decorator noop_context call_to_str required_torch_version "
        "DummyOptim": "ds_deepspeed_compat.utils.helpers",
        "clip_grad_norm_ clip_tensors_by_global_norm combine_grad_norm_groups "
        "get_flattened_grad_norm get_global_norm "
        "get_global_norm_of_tensors get_grad_norm get_grad_zeros get_weight_norm has_inf_or_nan "
        "is_invalid_grad_norm "
        "is_model_parallel_parameter CheckOverflow": "ds_deepspeed_compat.utils.norms",
        "align_dense_tensors all_gather_dp_groups all_gather_into_tensor_dp_groups "
        "filter_empty_parameters "
        "get_ma_status get_only_unique_item get_tensor_bytes is_optimized_parameter "
        "prefix_sum_inc": ("ds_deepspeed_compat.utils.tensor_helpers"),
        "partition_uniform partition_balanced": "ds_deepspeed_compat.utils.helpers",
        "PartitionedTensor": "ds_deepspeed_compat.utils.partitioned_tensor",
    },
    "deepspeed.runtime.comm.coalesced_collectives": {
        "reduce_scatter_coalesced": "ds_deepspeed_compat.services.coalesced",
        "all_to_all_quant_reduce all_to_all_loco_quant_reduce": missing(
            "the keys zero_quantized_gradients and zeropp_loco_param make ZeRO reduce so"
        ),
    },
    "deepspeed.runtime.eigenvalue": {
        "Eigenvalue": "ds_compression.eigenvalue.power_iteration",
    },
    "deepspeed.runtime.progressive_layer_drop": {
        "ProgressiveLayerDrop": "ds_progressive_layer_drop.schedule",
    },
    "deepspeed.runtime.sparse_tensor": {"SparseTensor": "ds_sparse_gradients:RowTensor"},
    "deepspeed.runtime.compiler": {
        "is_compile_supported disable is_compiling": "ds_deepspeed_compat.utils.helpers"
    },
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {
        "CurriculumScheduler": "ds_data_sampling.deepspeed.names"
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {
        "DeepSpeedDataSampler": differs(
            "ds_data_sampling.deepspeed.names",
            "another order of samples, the same at every world size; no messages",
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        "DataAnalyzer DistributedDataAnalyzer": differs(
            "ds_data_sampling.deepspeed.analyzer",
            "writes .npy files; custom_map_*, custom_reduce, specific_threads and sample_indices "
            "are errors",
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "MMapIndexedDataset MMapIndexedDatasetBuilder": "ds_data_sampling.deepspeed.rows",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed batch_by_seqlens "
        "scale_lr "
        "dataloader_for_variable_batch_size lr_scheduler_for_variable_batch_size "
        "VariableBatchSizeLR": missing(
            "data_efficiency.data_sampling.dynamic_batching does it; give initialize training_data"
        ),
    },
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": {
        "RandomLayerTokenDrop": missing("no layer is wrapped; use convert_to_random_ltd"),
    },
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "convert_to_random_ltd save_without_random_ltd "
        "remove_random_ltd_state_dict": "ds_data_sampling.random_ltd",
    },
    "deepspeed.runtime.domino.transformer": {
        "DominoTransformer DominoTransformerLayer": missing(
            "use section tensor_parallel, on any model"
        ),
    },
}
