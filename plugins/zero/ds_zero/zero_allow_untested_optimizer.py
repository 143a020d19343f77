"""The key ``zero_allow_untested_optimizer`` (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ds_config"]


def ds_config() -> type[BaseModel]:
    """The model of ``zero_allow_untested_optimizer``."""
    from ds_zero.config import AllowUntestedOptimizer

    return AllowUntestedOptimizer
