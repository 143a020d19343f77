"""The section ``data_efficiency``: which samples come when, and in which batches (torch-free)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_data_sampling.config import DataEfficiency

__all__ = ["ds_config", "ds_engine_methods"]


def ds_config() -> type[DataEfficiency]:
    """The section ``data_efficiency``."""
    from ds_data_sampling.config import DataEfficiency

    return DataEfficiency


def ds_engine_methods(ctx: Context) -> Mapping[str, Callable[..., Any]]:
    """Functions of the user's for the loader, under DeepSpeed's names."""
    from ds_data_sampling.callbacks import set_custom_curriculum_learning_schedule, set_data_post_process_func

    return {
        "set_custom_curriculum_learning_schedule": set_custom_curriculum_learning_schedule,
        "set_data_post_process_func": set_data_post_process_func,
    }
