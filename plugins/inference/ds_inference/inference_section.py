"""The section ``inference``: the config of `init_inference`, so that tools check it (torch-free)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["ds_config"]


def ds_config() -> type[BaseModel]:
    """The section ``inference``."""
    from ds_inference.config import DeepSpeedInferenceConfig

    return DeepSpeedInferenceConfig
