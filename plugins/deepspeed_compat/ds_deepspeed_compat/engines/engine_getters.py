"""Getters of DeepSpeed's engine that read a key of the config, as one table (loads no torch)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core import Engine

_ZERO = (
    "allgather_bucket_size allgather_partitions allgather_sequential contiguous_gradients "
    "elastic_checkpoint "
    "ignore_unused_parameters legacy_stage1 load_from_fp32_weights log_trace_cache_warnings "
    "max_live_parameters "
    "max_reuse_distance model_persistence_threshold module_granularity_threshold overlap_comm "
    "param_persistence_threshold prefetch_bucket_size reduce_bucket_size reduce_scatter "
    "round_robin_gradients "
    "sub_group_size"
)

CONFIG_KEYS: Mapping[str, tuple[str, Any]] = {
    **{f"zero_{key}": (f"zero_optimization.{key}", None) for key in _ZERO.split()},
    "zero_offload_optimizer": ("zero_optimization.offload_optimizer", None),
    "zero_offload_param": ("zero_optimization.offload_param", None),
    "zero_hpz_partition_size": ("zero_optimization.zero_hpz_partition_size", 1),
    "mics_shard_size": ("zero_optimization.mics_shard_size", -1),
    "zero_quantized_weights": ("zero_optimization.zero_quantized_weights", False),
    "zero_quantized_nontrainable_weights": (
        "zero_optimization.zero_quantized_nontrainable_weights",
        False,
    ),
    "zero_quantized_gradients": ("zero_optimization.zero_quantized_gradients", False),
    "is_sanity_checks_enabled": ("zero_optimization.enable_sanity_checks", False),
    "zero_allow_untested_optimizer": ("zero_allow_untested_optimizer", False),
    "zero_force_ds_cpu_optimizer": ("zero_force_ds_cpu_optimizer", True),
    "fp16_enabled": ("fp16.enabled", False),
    "fp16_auto_cast": ("fp16.auto_cast", False),
    "bfloat16_enabled": ("bf16.enabled", False),
    "torch_autocast_enabled": ("torch_autocast.enabled", False),
    "torch_autocast_lower_precision_safe_modules": (
        "torch_autocast.lower_precision_safe_modules",
        None,
    ),
    "gradient_clipping": ("gradient_clipping", 1.0),
    "gradient_predivide_factor": ("gradient_predivide_factor", 1.0),
    "managed_gradient_accumulation": ("managed_gradient_accumulation", True),
    "dataloader_drop_last": ("dataloader_drop_last", False),
    "optimizer_params": ("optimizer.params", None),
    "optimizer_legacy_fusion": ("optimizer.legacy_fusion", False),
    "scheduler_name": ("scheduler.type", None),
    "scheduler_params": ("scheduler.params", None),
    "log_level": ("log_level", None),
    "steps_per_print": ("steps_per_print", None),
    "wall_clock_breakdown": ("wall_clock_breakdown", False),
    "memory_breakdown": ("memory_breakdown", False),
    "dump_state": ("dump_state", False),
    "load_universal_checkpoint": ("checkpoint.load_universal", False),
    "use_node_local_storage": ("checkpoint.use_node_local_storage", False),
    "flops_profiler_enabled": ("flops_profiler.enabled", False),
    "autotuning_enabled": ("autotuning.enabled", False),
    "amp_enabled": ("amp.enabled", False),
    "pld_enabled": ("progressive_layer_drop.enabled", False),
    "eigenvalue_enabled": ("eigenvalue.enabled", False),
    "data_efficiency_enabled": ("data_efficiency.enabled", False),
    "curriculum_learning_enabled": (
        "data_efficiency.data_sampling.curriculum_learning.enabled",
        False,
    ),
    "curriculum_enabled_legacy": ("curriculum_learning.enabled", False),
    "random_ltd_enabled": ("data_efficiency.data_routing.random_ltd.enabled", False),
    "sparse_gradients_enabled": ("sparse_gradients", False),
    "autotp_size": ("tensor_parallel.autotp_size", 0),
}
"""Getter -> path of the key in the config, and what it gives where the config has no such section.
"""

_SECTIONS = {"zero_optimization": "ds_zero.config:ZeroConfig"}
"""Sections whose defaults a getter gives where the config has no such section, if their package is
installed.
"""


def read(engine: Engine, path: str, default: Any = None) -> Any:
    """The value at `path` of the run's config, or `default` where a section on the way is
    absent."""
    first, *keys = path.split(".")
    core = engine.config.core
    value: Any = (
        getattr(core, first) if first in type(core).model_fields else engine.config.section(first)
    )
    if value is None and first in _SECTIONS:
        value = _defaults(_SECTIONS[first])
    value = getattr(value, "root", value)
    for key in keys:
        value = getattr(value, key, None)
    return default if value is None else value


def _defaults(where: str) -> Any:
    module, _, name = where.partition(":")
    try:
        return getattr(importlib.import_module(module), name)()
    except ModuleNotFoundError:
        return None


def __getattr__(name: str) -> Callable[[Engine], Any]:
    """The getter of that name: a function of the engine."""
    if name not in CONFIG_KEYS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    path, default = CONFIG_KEYS[name]

    def get(engine: Engine) -> Any:
        return read(engine, path, default)

    get.__name__ = get.__qualname__ = name
    get.__doc__ = f"``{path}`` of the config."
    return get
