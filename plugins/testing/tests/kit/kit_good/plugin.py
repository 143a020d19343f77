"""The declaration module: light, strict, and all references lazy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

from ds_core.entries import Axis, KernelEntry, OptimizerEntry


class Inner(BaseModel):
    """Nested settings."""

    model_config = ConfigDict(extra="forbid")
    ratio: float = Field(0.5, ge=0, le=1, description="Share kept; 0 to 1.")


class KitConfig(BaseModel):
    """The section."""

    model_config = ConfigDict(extra="forbid")
    degree: int = Field(description="Ranks along the axis.", ge=1)
    inner: Inner = Field(default_factory=Inner, description="Nested settings.")


def ds_config() -> type[KitConfig]:
    """The model of section ``kit``."""
    return KitConfig


def ds_mesh_axes(config: object) -> Iterable[Axis]:
    """One axis."""
    return [Axis("kit", 1)]


def ds_optimizers() -> Mapping[str, OptimizerEntry]:
    """One optimizer."""
    return {"KitSGD": OptimizerEntry("kit_good.impl:kit_sgd", "kit_good.impl:KitParams")}


def ds_kernels() -> Iterable[KernelEntry]:
    """A kernel that serves, and one that this machine cannot serve."""
    return (
        KernelEntry("kit_add", "reference", "kit_good.impl:add", 0, dtypes=("float32",)),
        KernelEntry(
            "kit_add", "magic", "kit_good.impl:only_there", 30, available=lambda: "no magic here"
        ),
    )
