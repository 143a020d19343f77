"""The methods that packages of this repository add to the engine, for type checkers.

Written by ``make catalogue`` from the functions themselves. A method works where its package is
installed.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch.fx import GraphModule
from torch.utils.data import Dataset

from ds_core.engine import Engine, Loader

class PluginMethods:
    def _consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The module's whole ``state_dict``, on the CPU, on rank 0; None on the others. From
        dscore-deepspeed-compat."""

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """The module's whole ``state_dict``, on the CPU, on rank 0; None on the others. From
        dscore-deepspeed-compat."""

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Nothing: backward and step reduce gradients by themselves, which the log says once. From
        dscore-deepspeed-compat."""

    def amp_enabled(self) -> Any:
        """``amp.enabled`` of the config. From dscore-deepspeed-compat."""

    def autotp_size(self) -> Any:
        """``tensor_parallel.autotp_size`` of the config. From dscore-deepspeed-compat."""

    def autotuning_enabled(self) -> Any:
        """``autotuning.enabled`` of the config. From dscore-deepspeed-compat."""

    def bfloat16_enabled(self) -> Any:
        """``bf16.enabled`` of the config. From dscore-deepspeed-compat."""

    def checkpoint_tag_validation_enabled(self) -> bool:
        """Whether ranks compare their tags when they save. From dscore-deepspeed-compat."""

    def checkpoint_tag_validation_fail(self) -> bool:
        """Whether unequal tags are an error. From dscore-deepspeed-compat."""

    def compile_model(
        self,
        backend: str | Callable[..., Any] = "inductor",
        compile_kwargs: Mapping[str, Any] | None = None,
        schedule: Iterable[
            tuple[int, Iterable[str | Callable[[GraphModule, Sequence[Any]], GraphModule]]]
        ]
        | None = None,
        compiled_autograd_enabled: bool = False,
    ) -> None:
        """Compile the model with torch.compile, in place; `engine.compile` calls it. From dscore-
        compile."""

    def curriculum_enabled_legacy(self) -> Any:
        """``curriculum_learning.enabled`` of the config. From dscore-deepspeed-compat."""

    def curriculum_learning_enabled(self) -> Any:
        """``data_efficiency.data_sampling.curriculum_learning.enabled`` of the config. From dscore-
        deepspeed-compat."""

    def curriculum_seqlen(self) -> int:
        """The length of sequences in the coming step, or the one under way. From dscore-data-
        sampling."""

    def data_efficiency_enabled(self) -> Any:
        """``data_efficiency.enabled`` of the config. From dscore-deepspeed-compat."""

    def dataloader_drop_last(self) -> Any:
        """``dataloader_drop_last`` of the config. From dscore-deepspeed-compat."""

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_local_io_workers: int | None = None,
    ) -> Loader:
        """A loader of this rank's share of `dataset`; shuffled for route "train", in order for any
        other. From dscore-deepspeed-compat."""

    def dump_state(self) -> Any:
        """``dump_state`` of the config. From dscore-deepspeed-compat."""

    def dynamic_loss_scale(self) -> bool:
        """Whether the loss scale changes with overflows; false without fp16. From dscore-deepspeed-
        compat."""

    def dynamic_loss_scale_args(self) -> dict[str, Any]:
        """How the loss scale changes, by DeepSpeed's names. From dscore-deepspeed-compat."""

    def eigenvalue_enabled(self) -> Any:
        """``eigenvalue.enabled`` of the config. From dscore-deepspeed-compat."""

    def empty_partition_cache(self) -> None:
        """Free weights that the partitioner has gathered ahead or keeps for later. From dscore-
        deepspeed-compat."""

    def evaluate(
        self,
        data: Dataset[Any] | Iterable[Any],
        metrics: Mapping[str, Any],
        *,
        forward: Callable[[Engine, Any], Any] | None = None,
        prefix: str = "eval",
    ) -> dict[str, float]:
        """Metrics of the model over `data`, in eval mode and without gradients. Every rank calls
        it. From dscore-evaluation."""

    def flops_profiler_enabled(self) -> Any:
        """``flops_profiler.enabled`` of the config. From dscore-deepspeed-compat."""

    def fp16_auto_cast(self) -> Any:
        """``fp16.auto_cast`` of the config. From dscore-deepspeed-compat."""

    def fp16_enabled(self) -> Any:
        """``fp16.enabled`` of the config. From dscore-deepspeed-compat."""

    def generate(self, inputs: Any = None, /, **keywords: Any) -> Any:
        """Texts of the model with its weights as they are now; the keywords and the answer of
        ``module.generate``. From dscore-inference."""

    def generation_stats(self) -> Any:
        """How long ``engine.generate`` took on this rank so far, and how much it wrote. From
        dscore-inference."""

    def get_batch_info(self) -> tuple[int, int, int]:
        """(train batch size, micro-batch size, accumulation steps). From dscore-deepspeed-
        compat."""

    def get_data_parallel_rank(self) -> int:
        """This rank's place among those that divide the batch. From dscore-deepspeed-compat."""

    def get_data_types(self) -> tuple[Any, Any]:
        """The dtype of the weights in the module, and that in which gradients accumulate. From
        dscore-deepspeed-compat."""

    def get_model_parallel_rank(self) -> int:
        """This rank's place among those that divide the layers. From dscore-deepspeed-compat."""

    def get_mom(self) -> list[Any]:
        """Momentum (or betas) of each parameter group. From dscore-deepspeed-compat."""

    def get_pld_theta(self) -> float:
        """theta of the running step; 1 while the section is off, where no layer is dropped. From
        dscore-progressive-layer-drop."""

    def get_tensor_parallel_rank(self) -> int:
        """This rank's place among those that divide the layers. From dscore-deepspeed-compat."""

    def get_type(self) -> list[str | None]:
        """The ``type`` that each parameter group carries, if any. From dscore-deepspeed-compat."""

    def gradient_clipping(self) -> Any:
        """``gradient_clipping`` of the config. From dscore-deepspeed-compat."""

    def gradient_predivide_factor(self) -> Any:
        """``gradient_predivide_factor`` of the config. From dscore-deepspeed-compat."""

    def initial_dynamic_scale(self) -> float:
        """The loss scale at the start. From dscore-deepspeed-compat."""

    def is_iterable_style_dataset(self, obj: Any) -> bool:
        """Whether a dataset is a stream. From dscore-deepspeed-compat."""

    def is_map_style_dataset(self, obj: Any) -> bool:
        """Whether a dataset has items by number. From dscore-deepspeed-compat."""

    def is_sanity_checks_enabled(self) -> Any:
        """``zero_optimization.enable_sanity_checks`` of the config. From dscore-deepspeed-
        compat."""

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Load weights into the module, master weights with them; a checkpoint's dict is known by
        its key ``module``. From dscore-deepspeed-compat."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Make the values of `state_dict` the weights, their masters, and all copies of both. From
        dscore-dtensor."""

    def load_universal_checkpoint(self) -> Any:
        """``checkpoint.load_universal`` of the config. From dscore-deepspeed-compat."""

    def log_level(self) -> Any:
        """``log_level`` of the config. From dscore-deepspeed-compat."""

    def managed_gradient_accumulation(self) -> Any:
        """``managed_gradient_accumulation`` of the config. From dscore-deepspeed-compat."""

    def memory_breakdown(self) -> Any:
        """``memory_breakdown`` of the config. From dscore-deepspeed-compat."""

    def mics_shard_size(self) -> Any:
        """``zero_optimization.mics_shard_size`` of the config. From dscore-deepspeed-compat."""

    def module_state_dict(
        self,
        destination: Any = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> Any:
        """The module's ``state_dict``, as this rank holds it;
        `_zero3_consolidated_16bit_state_dict` gathers stage 3. From dscore-deepspeed-compat."""

    def offload_states(
        self,
        include: Iterable[Any | str] | None = None,
        device: Any | str = ...,
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move groups of states to host memory until `reload_states`, to make room for another
        phase of the program. From dscore-zero."""

    def optimizer_legacy_fusion(self) -> Any:
        """``optimizer.legacy_fusion`` of the config. From dscore-deepspeed-compat."""

    def optimizer_name(self) -> str | None:
        """``optimizer.type`` of the config; DeepSpeed's own names in small letters, as its engine
        gives them. From dscore-deepspeed-compat."""

    def optimizer_params(self) -> Any:
        """``optimizer.params`` of the config. From dscore-deepspeed-compat."""

    def plan_steps(self, total: int) -> None:
        """Tell the record how many optimizer steps this run will have in all, where the config does
        not say it. From dscore-report."""

    def pld_enabled(self) -> Any:
        """``progressive_layer_drop.enabled`` of the config. From dscore-deepspeed-compat."""

    def postscale_gradients(self) -> bool:
        """Whether gradients are divided after their sum. From dscore-deepspeed-compat."""

    def random_ltd_enabled(self) -> Any:
        """``data_efficiency.data_routing.random_ltd.enabled`` of the config. From dscore-deepspeed-
        compat."""

    def random_ltd_schedule(self) -> Any | None:
        """The schedule of an engine's run; None where no tokens are dropped. From dscore-data-
        sampling."""

    def register_compile_pass(
        self, name: str, change: Callable[[GraphModule, Sequence[Any]], GraphModule]
    ) -> None:
        """Give a pass of your own a name, for the ``schedule`` of ``engine.compile``. From dscore-
        compile."""

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move back what `offload_states` has moved; does nothing when nothing was. From dscore-
        zero."""

    def resume(self) -> str | None:
        """Load the newest whole checkpoint in ``autosave.folder`` and return its path; None: a new
        run. From dscore-elasticity."""

    def save_fp16_model(
        self,
        save_dir: str,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The old name of `Engine.save_16bit_model`. From dscore-deepspeed-compat."""

    def scheduler_name(self) -> Any:
        """``scheduler.type`` of the config. From dscore-deepspeed-compat."""

    def scheduler_params(self) -> Any:
        """``scheduler.params`` of the config. From dscore-deepspeed-compat."""

    def set_custom_curriculum_learning_schedule(
        self, schedule_func_dict: Mapping[str, Callable[[int], int]]
    ) -> None:
        """The schedules of metrics whose schedule_type is custom: functions (step from 1) ->
        difficulty, by metric. From dscore-data-sampling."""

    def set_data_post_process_func(
        self, post_process_func: Callable[[Any, Mapping[str, Any]], Any] | None
    ) -> None:
        """Let `post_process_func` change each batch before it is given out: (batch, state) ->
        batch; None: nothing does. From dscore-data-sampling."""

    def set_dataloader(self, loader: Iterable[Any]) -> None:
        """What `train_batch` takes its micro-batches from when it is given nothing; started again
        whenever it ends. From dscore-deepspeed-compat."""

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every parameter group. From dscore-deepspeed-compat."""

    def sparse_gradients_enabled(self) -> Any:
        """``sparse_gradients`` of the config. From dscore-deepspeed-compat."""

    def state_dict(
        self, *arguments: Any, view: str | None = None, masters: bool = True, **options: Any
    ) -> dict[str, Any]:
        """The weights and buffers by name, without a copy: sharded ones are DTensors. From dscore-
        dtensor."""

    def steps_per_print(self) -> Any:
        """``steps_per_print`` of the config. From dscore-deepspeed-compat."""

    def torch_autocast_dtype(self) -> Any:
        """The dtype of autocast; None when it is off. From dscore-deepspeed-compat."""

    def torch_autocast_enabled(self) -> Any:
        """``torch_autocast.enabled`` of the config. From dscore-deepspeed-compat."""

    def torch_autocast_lower_precision_safe_modules(self) -> Any:
        """``torch_autocast.lower_precision_safe_modules`` of the config. From dscore-deepspeed-
        compat."""

    def use_node_local_storage(self) -> Any:
        """``checkpoint.use_node_local_storage`` of the config. From dscore-deepspeed-compat."""

    def wall_clock_breakdown(self) -> Any:
        """``wall_clock_breakdown`` of the config. From dscore-deepspeed-compat."""

    def zero_allgather_bucket_size(self) -> Any:
        """``zero_optimization.allgather_bucket_size`` of the config. From dscore-deepspeed-
        compat."""

    def zero_allgather_partitions(self) -> Any:
        """``zero_optimization.allgather_partitions`` of the config. From dscore-deepspeed-
        compat."""

    def zero_allgather_sequential(self) -> Any:
        """``zero_optimization.allgather_sequential`` of the config. From dscore-deepspeed-
        compat."""

    def zero_allow_untested_optimizer(self) -> Any:
        """``zero_allow_untested_optimizer`` of the config. From dscore-deepspeed-compat."""

    def zero_contiguous_gradients(self) -> Any:
        """``zero_optimization.contiguous_gradients`` of the config. From dscore-deepspeed-
        compat."""

    def zero_cpu_offload(self) -> bool:
        """Whether optimizer states rest on the host. From dscore-deepspeed-compat."""

    def zero_elastic_checkpoint(self) -> Any:
        """``zero_optimization.elastic_checkpoint`` of the config. From dscore-deepspeed-compat."""

    def zero_force_ds_cpu_optimizer(self) -> Any:
        """``zero_force_ds_cpu_optimizer`` of the config. From dscore-deepspeed-compat."""

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Whether `save_16bit_model` writes at stage 3: unless the config says false. From dscore-
        deepspeed-compat."""

    def zero_hpz_partition_size(self) -> Any:
        """``zero_optimization.zero_hpz_partition_size`` of the config. From dscore-deepspeed-
        compat."""

    def zero_ignore_unused_parameters(self) -> Any:
        """``zero_optimization.ignore_unused_parameters`` of the config. From dscore-deepspeed-
        compat."""

    def zero_legacy_stage1(self) -> Any:
        """``zero_optimization.legacy_stage1`` of the config. From dscore-deepspeed-compat."""

    def zero_load_from_fp32_weights(self) -> Any:
        """``zero_optimization.load_from_fp32_weights`` of the config. From dscore-deepspeed-
        compat."""

    def zero_log_trace_cache_warnings(self) -> Any:
        """``zero_optimization.log_trace_cache_warnings`` of the config. From dscore-deepspeed-
        compat."""

    def zero_max_live_parameters(self) -> Any:
        """``zero_optimization.max_live_parameters`` of the config. From dscore-deepspeed-compat."""

    def zero_max_reuse_distance(self) -> Any:
        """``zero_optimization.max_reuse_distance`` of the config. From dscore-deepspeed-compat."""

    def zero_model_persistence_threshold(self) -> Any:
        """``zero_optimization.model_persistence_threshold`` of the config. From dscore-deepspeed-
        compat."""

    def zero_module_granularity_threshold(self) -> Any:
        """``zero_optimization.module_granularity_threshold`` of the config. From dscore-deepspeed-
        compat."""

    def zero_nvme_offload_optimizer(self) -> bool:
        """Whether optimizer states rest on NVMe. From dscore-deepspeed-compat."""

    def zero_offload_optimizer(self) -> Any:
        """``zero_optimization.offload_optimizer`` of the config. From dscore-deepspeed-compat."""

    def zero_offload_param(self) -> Any:
        """``zero_optimization.offload_param`` of the config. From dscore-deepspeed-compat."""

    def zero_optimization(self) -> bool:
        """Whether anything is sharded over ranks. From dscore-deepspeed-compat."""

    def zero_optimization_partition_gradients(self) -> bool:
        """Whether gradients are sharded over ranks (ZeRO stages 2 and 3), which rules out
        `no_sync`. From dscore-deepspeed-compat."""

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are sharded over ranks (ZeRO stage 3). From dscore-deepspeed-compat."""

    def zero_optimization_stage(self) -> int:
        """The stage of ZeRO, 0 to 3. From dscore-deepspeed-compat."""

    def zero_overlap_comm(self) -> Any:
        """``zero_optimization.overlap_comm`` of the config. From dscore-deepspeed-compat."""

    def zero_param_persistence_threshold(self) -> Any:
        """``zero_optimization.param_persistence_threshold`` of the config. From dscore-deepspeed-
        compat."""

    def zero_partial_offload(self) -> float:
        """The share of optimizer states that is offloaded. From dscore-deepspeed-compat."""

    def zero_prefetch_bucket_size(self) -> Any:
        """``zero_optimization.prefetch_bucket_size`` of the config. From dscore-deepspeed-
        compat."""

    def zero_quantized_gradients(self) -> Any:
        """``zero_optimization.zero_quantized_gradients`` of the config. From dscore-deepspeed-
        compat."""

    def zero_quantized_nontrainable_weights(self) -> Any:
        """``zero_optimization.zero_quantized_nontrainable_weights`` of the config. From dscore-
        deepspeed-compat."""

    def zero_quantized_weights(self) -> Any:
        """``zero_optimization.zero_quantized_weights`` of the config. From dscore-deepspeed-
        compat."""

    def zero_reduce_bucket_size(self) -> Any:
        """``zero_optimization.reduce_bucket_size`` of the config. From dscore-deepspeed-compat."""

    def zero_reduce_scatter(self) -> Any:
        """``zero_optimization.reduce_scatter`` of the config. From dscore-deepspeed-compat."""

    def zero_round_robin_gradients(self) -> Any:
        """``zero_optimization.round_robin_gradients`` of the config. From dscore-deepspeed-
        compat."""

    def zero_sub_group_size(self) -> Any:
        """``zero_optimization.sub_group_size`` of the config. From dscore-deepspeed-compat."""

    def zero_use_cpu_optimizer(self) -> bool:
        """Whether the optimizer's arithmetic runs on the host. From dscore-deepspeed-compat."""
