"""The declaration of old-mesh-axis: a mesh axis, and what differs along it (torch-free)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section
from ds_core.entries import Axis

if TYPE_CHECKING:
    from ds_core.config import RunConfig


class Settings(Section):
    """The section ``old_mesh_axis``."""

    size: int = Field(1, ge=1, description="How many ranks have towers of their own.")


def ds_config() -> type[Settings]:
    """The section's model."""
    return Settings


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """inside="dp": the axis lies in the data-parallel one, and needs no more ranks."""
    settings = config.section("old_mesh_axis")
    assert isinstance(settings, Settings)
    return [Axis("old_mesh_axis", settings.size, inside="dp")]


def ds_param_axes(name: str) -> Collection[str] | None:
    """The axes along which ranks have different parameters under this name; None: no opinion."""
    return ["old_mesh_axis"] if any(part.startswith("tower") for part in name.split(".")) else None
