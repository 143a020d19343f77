"""``deepspeed.runtime``: the engine, its config, precision, loader and helpers."""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Rows, differs, missing

_CONFIG = "checked as a run's config is; setting an attribute changes no run"

NAMES: Mapping[str, Rows] = {
    "deepspeed.runtime.engine": {
        "DeepSpeedEngine DeepSpeedOptimizerCallable DeepSpeedSchedulerCallable": "ds_deepspeed_compat.engine",
        "MEMORY_OPT_ALLREDUCE_SIZE": "ds_deepspeed_compat.constants",
    },
    "deepspeed.runtime.hybrid_engine": {
        "DeepSpeedHybridEngine": differs(
            "ds_deepspeed_compat.engine:DeepSpeedEngine", "any engine; section hybrid_engine gives it generate"
        ),
    },
    "deepspeed.runtime.config": {
        "DeepSpeedConfig": differs("ds_deepspeed_compat.deepspeed_config", _CONFIG),
        "DeepSpeedConfigModel get_bfloat16_config get_float16_config get_zero_config get_scalar_param": (
            "ds_deepspeed_compat.config_models"
        ),
        "DeepSpeedActivationCheckpointingConfig DeepSpeedFlopsProfilerConfig DeepSpeedAutotuningConfig "
        "DeepSpeedCommsConfig HybridEngineConfig CompileConfig get_monitor_config get_timers_config get_aio_config": (
            "ds_deepspeed_compat.section_defaults"
        ),
        "ZeroStageEnum DtypeEnum": "ds_deepspeed_compat.enums",
        "dict_raise_error_on_duplicate_keys": "ds_deepspeed_compat.files",
        "DeepSpeedConfigError": "ds_core.errors:ConfigError",
        "ADAM_OPTIMIZER ADAMW_OPTIMIZER ADAGRAD_OPTIMIZER LAMB_OPTIMIZER LION_OPTIMIZER MUON_OPTIMIZER "
        "ONEBIT_ADAM_OPTIMIZER ONEBIT_LAMB_OPTIMIZER ZERO_ONE_ADAM_OPTIMIZER MUADAM_OPTIMIZER MUADAMW_OPTIMIZER "
        "MUSGD_OPTIMIZER DEEPSPEED_OPTIMIZERS": "ds_deepspeed_compat.constants",
    },
    "deepspeed.runtime.config_utils": {
        "DeepSpeedConfigModel": "ds_deepspeed_compat.config_models",
        "get_scalar_param get_list_param get_dict_param": "ds_deepspeed_compat.config_models:get_scalar_param",
        "dict_raise_error_on_duplicate_keys": "ds_deepspeed_compat.files",
    },
    "deepspeed.runtime.precision_config": {
        "DeepSpeedFP16Config DeepSpeedBF16Config get_float16_config get_bfloat16_config": (
            "ds_deepspeed_compat.config_models"
        ),
    },
    "deepspeed.runtime.activation_checkpointing.config": {
        "DeepSpeedActivationCheckpointingConfig": "ds_deepspeed_compat.section_defaults",
    },
    "deepspeed.runtime.swap_tensor.aio_config": {
        "get_aio_config AIO_DEFAULT_DICT": "ds_deepspeed_compat.section_defaults",
    },
    "deepspeed.runtime.base_optimizer": {"DeepSpeedOptimizer ZeROOptimizer": "ds_deepspeed_compat.optimizer"},
    "deepspeed.runtime.bf16_optimizer": {"BF16_Optimizer": "ds_deepspeed_compat.optimizer"},
    "deepspeed.runtime.fp16.fused_optimizer": {"FP16_Optimizer": "ds_deepspeed_compat.optimizer"},
    "deepspeed.runtime.fp16.unfused_optimizer": {"FP16_UnfusedOptimizer": "ds_deepspeed_compat.optimizer"},
    "deepspeed.runtime.fp16.loss_scaler": {
        "LossScalerBase LossScaler DynamicLossScaler": differs(
            "ds_deepspeed_compat.optimizer", "views of the engine's; section fp16 sets it"
        ),
        "CreateLossScaler": missing("section fp16 of the config makes the loss scale"),
    },
    "deepspeed.runtime.dataloader": {
        "RepeatingLoader": "ds_core",
        "DeepSpeedDataLoader": differs(
            "ds_deepspeed_compat.loader", "shuffles anew in each epoch, and has no worker processes unless told"
        ),
    },
    "deepspeed.runtime.torch_autocast": {
        "init_autocast_params is_autocast_initialized "
        "get_default_autocast_lower_precision_modules": "ds_deepspeed_compat.autocast",
    },
    "deepspeed.runtime.activation_checkpointing.checkpointing deepspeed.checkpointing": {
        "configure is_configured checkpoint non_reentrant_checkpoint reset get_cuda_rng_tracker "
        "CudaRNGStatesTracker model_parallel_cuda_manual_seed": "ds_activation_checkpointing",
        "CheckpointFunction": differs(
            "ds_activation_checkpointing", "has apply(function, outputs, *args), and is no torch.autograd.Function"
        ),
    },
    "deepspeed.runtime.utils": {
        "see_memory_usage memory_status empty_cache set_random_seed move_to_device copy_to_device "
        "ensure_directory_exists noop_decorator noop_context call_to_str required_torch_version "
        "clip_grad_norm_ get_global_norm get_grad_norm get_weight_norm DummyOptim": "ds_deepspeed_compat.helpers",
        "partition_uniform partition_balanced": "ds_deepspeed_compat.helpers",
        "CheckOverflow PartitionedTensor": missing("the engine agrees on overflow by itself"),
    },
    "deepspeed.runtime.eigenvalue": {
        "Eigenvalue": missing("they only set how fast weights lose bits; use quantization_period")
    },
    "deepspeed.runtime.progressive_layer_drop": {
        "ProgressiveLayerDrop": "ds_progressive_layer_drop.schedule",
    },
    "deepspeed.runtime.sparse_tensor": {"SparseTensor": missing("gradients of embeddings are dense")},
    "deepspeed.runtime.compiler": {"is_compile_supported disable is_compiling": "ds_deepspeed_compat.helpers"},
    "deepspeed.runtime.constants": {
        "ROUTE_TRAIN ROUTE_EVAL ROUTE_PREDICT ROUTE_ENCODE": "ds_deepspeed_compat.constants",
    },
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": {"CurriculumScheduler": "ds_data_sampling.deepspeed_names"},
    "deepspeed.runtime.data_pipeline.data_sampling.data_sampler": {
        "DeepSpeedDataSampler": differs(
            "ds_data_sampling.deepspeed_names", "another order of samples, the same at every world size; no messages"
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.data_analyzer": {
        "DataAnalyzer DistributedDataAnalyzer": differs(
            "ds_data_sampling.deepspeed_analyzer",
            "writes .npy files; custom_map_*, custom_reduce, specific_threads and sample_indices are errors",
        ),
    },
    "deepspeed.runtime.data_pipeline.data_sampling.indexed_dataset": {
        "MMapIndexedDataset MMapIndexedDatasetBuilder": "ds_data_sampling.deepspeed_rows",
    },
    "deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr": {
        "get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed batch_by_seqlens scale_lr "
        "dataloader_for_variable_batch_size lr_scheduler_for_variable_batch_size VariableBatchSizeLR": missing(
            "data_efficiency.data_sampling.dynamic_batching does it; give initialize training_data"
        ),
    },
    "deepspeed.runtime.data_pipeline.data_routing.basic_layer": {
        "RandomLayerTokenDrop": missing("no layer is wrapped; use convert_to_random_ltd"),
    },
    "deepspeed.runtime.data_pipeline.data_routing.helper": {
        "convert_to_random_ltd save_without_random_ltd": "ds_data_sampling.random_ltd",
    },
    "deepspeed.runtime.domino.transformer": {
        "DominoTransformer DominoTransformerLayer": missing("use section tensor_parallel, on any model"),
    },
}
