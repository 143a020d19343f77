"""The section ``sequence_parallel_size``, DeepSpeed's key for ``sequence_parallel.size`` (torch-free).

Where the config has the section ``sequence_parallel`` as well, that section's module answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context
    from ds_core.entries import Axis, Transform

__all__ = ["ds_config", "ds_mesh_axes", "ds_transforms"]


def ds_config() -> type[BaseModel]:
    """The section ``sequence_parallel_size``."""
    from ds_sequence_parallel.config import SequenceParallelSize

    return SequenceParallelSize


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """See `ds_sequence_parallel.plugin`."""
    from ds_sequence_parallel import plugin
    from ds_sequence_parallel.config import SequenceParallelConfig

    return plugin.ds_mesh_axes(config) if config.section(SequenceParallelConfig) is None else []


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """See `ds_sequence_parallel.plugin`."""
    from ds_sequence_parallel import plugin
    from ds_sequence_parallel.config import SequenceParallelConfig

    return plugin.ds_transforms(ctx) if ctx.config.section(SequenceParallelConfig) is None else []
