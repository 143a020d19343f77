"""What the documented calls are given: a config with the section, and a model that may be in a
wrapper.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_compression.config import CompressionConfig
from ds_core.errors import ConfigError
from ds_core.setup.compose import compose

ROOT = "compression_training"


def section_of(config: Any) -> CompressionConfig:
    """The section of a config. Raises ConfigError where there is none."""
    chosen_config = compose(config).config
    section = chosen_config.section(CompressionConfig)
    if section is None:
        raise ConfigError(
            f"it has no section {ROOT}, or nothing in it is enabled", chosen_config.origin
        )
    return section


def inner(model: nn.Module) -> nn.Module:
    """The module in a wrapper (an engine, DDP), or the model itself."""
    found = getattr(model, "module", None)
    return found if isinstance(found, nn.Module) else model
