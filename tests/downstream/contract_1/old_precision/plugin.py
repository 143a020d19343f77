"""The declaration of old-precision: its section and its precision mode (torch-free)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.config import RunConfig
    from ds_core.precision import Precision


class Settings(Section):
    """The section ``old_precision``."""

    bits: int = Field(8, ge=2, le=8, description="Bits of a weight.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_precision(config: RunConfig, base: Precision) -> Precision | None:
    """base: what fp16, bf16 and torch_autocast ask for. The name is compared between ranks: it says what matters."""
    from old_precision.layers import converter

    settings = config.section("old_precision")
    assert isinstance(settings, Settings)
    name = f"{base.name} with weights of {settings.bits} bits"
    return replace(base, name=name, convert=converter(settings.bits))
