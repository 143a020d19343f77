"""A plugin of somebody else: Gaussian noise on gradients, equal at every world size and however
parameters are divided.
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
    """Add noise that depends on seed, step and parameter alone: a rank that has a slice of a
    parameter takes the same slice of the noise.
    """
    import torch
    from ds_run_state.slices import SLICES

    section = ctx.config.section("gradient_noise")
    assert isinstance(section, NoiseConfig)
    slices = ctx.stash.get(SLICES) or {}
    for shard in gradients.shards:
        seed = zlib.crc32(f"{section.seed} {gradients.step} {shard.name}".encode())
        whole = slices.get(shard.name)
        shape = shard.shape if whole is None else whole.shape
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        noise = noise if whole is None else whole.take(noise)
        shard.tensor.add_(shard.take(noise).to(shard.tensor), alpha=section.std / gradients.factor)
