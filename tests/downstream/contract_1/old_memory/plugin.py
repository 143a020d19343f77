"""The declaration of old-memory: its section and what it says of memory (torch-free)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import RunConfig


class Settings(Section):
    """The section ``old_memory``."""

    bytes_per_element: int = Field(16, ge=1, description="Bytes of weight, gradient, master and moments of an element.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_memory(config: RunConfig, module: nn.Module, world: int) -> Mapping[str, float]:
    """The weights are on every rank, the rest is divided among them."""
    settings = config.section("old_memory")
    assert isinstance(settings, Settings)
    weights = sum(p.numel() * p.element_size() for p in module.parameters())
    everything = sum(p.numel() for p in module.parameters()) * settings.bytes_per_element
    return {"device": weights + max(0, everything - weights) / world, "host": 0, "disk": 0}
