"""Methods and attributes of DeepSpeed's engines, pipeline modules and optimizers, by the class that
has them.
"""

from __future__ import annotations

from collections.abc import Mapping

from ds_deepspeed_compat.names.entry import Name, Rows, State, differs, missing

_WORKS = Name(State.WORKS)

MEMBERS: Mapping[str, Rows] = {
    "deepspeed.DeepSpeedEngine": {
        "module optimizer lr_scheduler training_dataloader config device local_rank global_rank "
        "world_size "
        "dp_world_size mp_world_size seq_dp_world_size sequence_parallel_size data_parallel_group "
        "mpu dist_backend "
        "micro_steps global_steps global_samples skipped_steps monitor collate_fn client_optimizer "
        "client_lr_scheduler "
        "basic_optimizer loaded_checkpoint_tag loaded_checkpoint_dp_world_size "
        "loaded_checkpoint_mp_world_size "
        "communication_data_type param_names has_moe_layers num_experts gradient_average "
        "is_compiled": _WORKS,
        "forward step scale no_sync is_gradient_accumulation_boundary "
        "set_gradient_accumulation_boundary train eval "
        "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps get_lr set_lr "
        "get_mom get_type "
        "get_batch_info get_global_grad_norm was_step_applied deepspeed_io empty_partition_cache "
        "destroy "
        "save_checkpoint module_state_dict load_module_state_dict get_data_parallel_rank "
        "get_model_parallel_rank "
        "get_tensor_parallel_rank get_data_types set_dataloader set_dataiterator train_batch "
        "eval_batch": _WORKS,
        "zero_optimization zero_optimization_stage zero_optimization_partition_gradients "
        "zero_optimization_partition_weights fp16_enabled bfloat16_enabled torch_autocast_enabled "
        "torch_autocast_dtype "
        "gradient_clipping gradient_predivide_factor postscale_gradients loss_scale "
        "dynamic_loss_scale "
        "initial_dynamic_scale dynamic_loss_scale_args optimizer_name optimizer_params "
        "scheduler_name scheduler_params "
        "steps_per_print wall_clock_breakdown memory_breakdown dump_state "
        "managed_gradient_accumulation "
        "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_cpu_offload "
        "zero_offload_optimizer "
        "zero_offload_param zero_reduce_bucket_size zero_allgather_bucket_size zero_sub_group_size "
        "zero_overlap_comm "
        "zero_contiguous_gradients zero_reduce_scatter zero_prefetch_bucket_size "
        "zero_param_persistence_threshold "
        "zero_max_live_parameters zero_max_reuse_distance "
        "zero_gather_16bit_weights_on_model_save": _WORKS,
        "offload_states reload_states": differs("ds_zero", "engines of stage 3 have them"),
        "load_checkpoint": differs(
            "ds_core", "loads at any layout; `latest` missing beside checkpoints is an error"
        ),
        "backward": differs("ds_core", "allreduce_gradients=False is an error among several ranks"),
        "coalesce_grad_reduction": differs("ds_core", "works at every stage and precision"),
        "set_train_batch_size set_train_micro_batch_size": differs(
            "ds_core", "in the middle of an accumulation window, from the next one on"
        ),
        "zero_grad": differs("ds_core", "set_to_none=False is an error: gradients are dropped"),
        "compile": differs(
            "ds_compile",
            "compiled_autograd_enabled=True is an error; passes in schedule: see dscore-compile",
        ),
        "register_compile_pass": differs(
            "ds_compile", "a pass is a function (graph, inputs) -> graph"
        ),
        "save_16bit_model save_fp16_model": differs(
            "ds_core", "writes safetensors, never a pickle"
        ),
        "allreduce_gradients": differs(
            "ds_core", "without effect: backward and step reduce by themselves"
        ),
        "_zero3_consolidated_16bit_state_dict _consolidated_16bit_state_dict": differs(
            "ds_deepspeed_compat", "any stage and layout; in the weights' own dtypes"
        ),
        "load_moe_state_dict allreduce_bucket allreduce_and_copy allreduce_no_retain "
        "buffered_allreduce_fallback "
        "sparse_allreduce": missing("the partitioner reduces; load_checkpoint reads experts"),
        "get_compile_time": missing("torch._dynamo.utils.compile_times() tells it"),
    },
    "deepspeed.PipelineEngine": {
        "train_batch eval_batch is_first_stage is_last_stage set_dataiterator set_dataloader "
        "set_batch_fn "
        "reset_activation_shape num_stages stage_id micro_batches micro_batch_size grid mpu "
        "prev_stage next_stage "
        "is_data_parallel is_model_parallel is_pipe_parallel": _WORKS,
    },
    "deepspeed.pipe.PipelineModule": {
        "forward topology mpu num_pipeline_stages partitions stage_owner get_additional_losses "
        "compile "
        "ckpt_prefix ckpt_layer_path ckpt_layer_path_list save_state_dict": _WORKS,
        "allreduce_tied_weight_gradients": missing(
            "the schedule's ReduceTiedGrads does it in train_batch"
        ),
    },
    "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3": {
        "optimizer param_groups state defaults state_dict load_state_dict zero_grad "
        "add_param_group backward overflow "
        "loss_scale cur_scale loss_scaler dynamic_loss_scale clip_grad gradient_accumulation_steps "
        "bit16_groups "
        "fp16_groups fp32_partitioned_groups_flat dp_process_group partition_gradients cpu_offload "
        "module "
        "parameter_offload leaf_parameters": _WORKS,
        "bit16_groups_flat": differs(
            "ds_deepspeed_compat", "copies, as this rank holds the weights"
        ),
        "step": differs("ds_deepspeed_compat", "engine.step(): an accumulation window is kept"),
        "accumulated_grads_in_cpu": differs(
            "ds_deepspeed_compat", "what is reduced so far, to read; {} without offload"
        ),
    },
}
