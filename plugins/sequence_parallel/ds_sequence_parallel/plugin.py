"""What this distribution offers to ds_core: sections, their axis, their transform (torch-free)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Axis, Phase, Transform
from ds_core.errors import Problem

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> Mapping[str, type[BaseModel]]:
    """The section ``sequence_parallel``, and DeepSpeed's two keys beside it."""
    from ds_sequence_parallel.config import (
        SequenceCommunicationDtype,
        SequenceParallelConfig,
        SequenceParallelSize,
    )

    return {
        "sequence_parallel": SequenceParallelConfig,
        "sequence_parallel_size": SequenceParallelSize,
        "seq_parallel_communication_data_type": SequenceCommunicationDtype,
    }


def ds_check(config: RunConfig) -> Iterable[Problem]:
    """The two keys of the size agree, and there is one dtype for gradients."""
    from ds_sequence_parallel.config import SequenceParallelSize, dtype_problems, settings

    size = settings(config).size
    other = config.section(SequenceParallelSize)
    if size is not None and other is not None and other.root != size:
        why = f"is {size}, but sequence_parallel_size is {other.root}"
        yield Problem("sequence_parallel.size", why, "give one of the two")
    yield from dtype_problems(config)


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """``sp``, folded inside dp: its ranks have the same parameters, and work on parts of the same
    sequences.
    """
    from ds_sequence_parallel.config import sp_size

    return [Axis("sp", sp_size(config), inside="dp", same_batch=True)]


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Inputs are cut, and attention is exchanged, unless a compile pass does that; then tiles and
    offloading.
    """
    from ds_core.config import Trait
    from ds_sequence_parallel.config import settings

    def divide(model):  # type: ignore[no-untyped-def]
        from ds_sequence_parallel.transform import divide

        return divide(model, ctx)

    def save_memory(model):  # type: ignore[no-untyped-def]
        from ds_sequence_parallel.tiles.memory import save_memory

        return save_memory(model, ctx)

    asked = settings(ctx.config)
    if not ctx.config.has(f"{Trait.COMPILE_PASS}autosp"):
        yield Transform(Phase.SHARD, divide)
    if (asked.tiled_mlp or asked.tiled_loss or asked.offload_activations) is not None:
        yield Transform(Phase.RECOMPUTE, save_memory)
