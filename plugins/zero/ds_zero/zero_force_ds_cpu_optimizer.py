"""The key ``zero_force_ds_cpu_optimizer`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ds_config"]


def ds_config() -> type[BaseModel]:
    """The model of ``zero_force_ds_cpu_optimizer``."""
    from ds_zero.config import ForceOwnOptimizer

    return ForceOwnOptimizer
