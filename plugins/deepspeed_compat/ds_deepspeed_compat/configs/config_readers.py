"""The functions ``get_*(param_dict)`` of ``deepspeed.runtime.config``: one value of a config, or
its default.

Keys and defaults are DeepSpeed's own constants, ``NAME`` and ``NAME_DEFAULT``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ds_deepspeed_compat.names import constants

_VALUES = {**constants()["deepspeed.runtime.constants"], **constants()["deepspeed.runtime.config"]}
_TOP = (
    "gradient_accumulation_steps managed_gradient_accumulation prescale_gradients "
    "gradient_predivide_factor "
    "gradient_allreduce_op steps_per_print disable_allgather dump_state disable_python_gc "
    "gradient_clipping "
    "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer train_batch_size "
    "train_micro_batch_size_per_gpu "
    "wall_clock_breakdown memory_breakdown dataloader_drop_last log_level"
)
"""Functions that read the key that their name says."""
_INNER = {
    "optimizer_name": ("optimizer", "type", None),
    "optimizer_params": ("optimizer", "params", None),
    "optimizer_legacy_fusion": ("optimizer", "legacy_fusion", False),
    "scheduler_name": ("scheduler", "type", None),
    "scheduler_params": ("scheduler", "params", None),
    "torch_autocast_enabled": ("torch_autocast", "enabled", False),
    "lower_precision_safe_modules": ("torch_autocast", "lower_precision_safe_modules", None),
    "checkpoint_tag_validation_mode": ("checkpoint", "tag_validation", "Warn"),
}
"""Functions that read a key of a section: function -> section, key, default."""
_SECTIONS = {"checkpoint_params": "checkpoint", "data_types_params": "data_types"}


def _of_top(word: str) -> Callable[[Mapping[str, Any]], Any]:
    key = _VALUES.get(word.upper(), word)
    default = _VALUES.get(f"{word.upper()}_DEFAULT")
    return lambda param_dict: param_dict.get(key, default)


def _of_section(section: str, key: str, default: Any) -> Callable[[Mapping[str, Any]], Any]:
    return lambda param_dict: (param_dict.get(section) or {}).get(key, default)


def _of_whole(section: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda param_dict: param_dict.get(section, {})


def get_optimizer_gradient_clipping(param_dict: Mapping[str, Any]) -> Any:
    """``max_grad_norm`` of the optimizer's params; None without one."""
    return (READERS["get_optimizer_params"](param_dict) or {}).get("max_grad_norm")


def get_communication_data_type(param_dict: Mapping[str, Any], *_: Any) -> Any:
    """The dtype of that name in torch, such as ``"fp16"``; None where the config leaves it to the
    precision.
    """
    import torch

    names = {
        "fp32": torch.float32,
        "fp16": torch.float16,
        "bf16": torch.bfloat16,
        "bfp16": torch.bfloat16,
    }
    name = param_dict.get("communication_data_type")
    if name is None:
        return None
    if str(name).lower() not in names:
        raise ValueError(f"communication_data_type is {name!r}; it is one of {', '.join(names)}")
    return names[str(name).lower()]


READERS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    **{f"get_{word}": _of_top(word) for word in _TOP.split()},
    **{f"get_{word}": _of_section(*row) for word, row in _INNER.items()},
    **{f"get_{word}": _of_whole(section) for word, section in _SECTIONS.items()},
}


def __getattr__(name: str) -> Any:
    """One of READERS: they are made from a table, and asked for by their names."""
    try:
        return READERS[name]
    except KeyError:
        raise AttributeError(name) from None
