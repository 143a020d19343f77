"""A plugin of somebody else: Gaussian noise on gradients, equal at every world size and however
they are sharded.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from pydantic import Field

from ds_core.config import Section

if TYPE_CHECKING:
    from ds_core.context import Context
    from ds_core.gradients import Gradients


class NoiseConfig(Section):
    """The section ``gradient_noise``."""

    std: float = Field(
        gt=0, description="Standard deviation of the noise on each element of a gradient."
    )
    seed: int = Field(0, description="Seed of the noise.")


def ds_config() -> type[NoiseConfig]:
    """The model of section ``gradient_noise``."""
    return NoiseConfig


def ds_gradients(ctx: Context, gradients: Gradients) -> None:
    """Add noise that depends on seed, step and parameter alone; ranks with different parameters get
    their own.
    """
    import torch

    section = ctx.config.section("gradient_noise")
    assert isinstance(section, NoiseConfig)
    for shard in gradients.shards:
        place = [ctx.mesh.index(axis) for axis in shard.held]
        seed = zlib.crc32(f"{section.seed} {gradients.step} {shard.name} {place}".encode())
        noise = torch.randn(shard.shape, generator=torch.Generator().manual_seed(seed))
        shard.tensor.add_(shard.take(noise).to(shard.tensor), alpha=section.std / gradients.factor)
