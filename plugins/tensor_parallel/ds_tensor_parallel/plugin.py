"""What this distribution offers to ds_core: the section ``tensor_parallel``, its axis, transform
and compile pass.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING

from ds_core.entries import Axis, Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    """The section ``tensor_parallel``."""
    from ds_tensor_parallel.config import TensorParallelConfig

    return TensorParallelConfig


def ds_compile_passes() -> Mapping[str, str]:
    """``autotp``, which needs divided layers and changes no graph."""
    return {"autotp": "ds_tensor_parallel.compile_passes:autotp"}


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """``tp``: its ranks have parts of the same layers, and work on the same samples."""
    from ds_tensor_parallel.config import TensorParallelConfig

    section = config.section(TensorParallelConfig)
    return [Axis("tp", section.size if section is not None else 1)]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    """``tp`` for what is cut along it."""
    from ds_run_state.slices import SLICES

    piece = (ctx.stash.get(SLICES) or {}).get(name)
    return ("tp",) if piece is not None and "tp" in piece.axes else ()


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Layers are cut to what this rank has of them."""

    def apply(model):  # type: ignore[no-untyped-def]
        from ds_tensor_parallel.transform import divide

        return divide(model, ctx)

    return [Transform(Phase.SHARD, apply)] if ctx.mesh.has("tp") and ctx.mesh.size("tp") > 1 else []
