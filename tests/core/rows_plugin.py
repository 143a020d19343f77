"""A plugin that leaves each rank along ``ep`` some rows of the parameters whose names begin with ``rows``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from ds_core.entries import Axis, Phase, Transform
from ds_core.slices import SLICES, Slice

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    from ds_core.config import Section

    class Rows(Section):
        size: int = 1

    return Rows


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    section: Any = config.section("rows")
    return [Axis("ep", section.size, inside="dp")]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    return ("ep",) if name in (ctx.stash.get(SLICES) or ()) else ()


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    def cut(model: Any) -> Any:
        slices = {}
        for name, param in model.named_parameters():
            if name.startswith("rows"):
                rows = param.shape[0] // ctx.mesh.size("ep")
                slices[name] = Slice("ep", tuple(param.shape), ctx.mesh.index("ep") * rows, rows)
                param.data = param.data[slices[name].first : slices[name].first + rows].clone()
        ctx.stash[SLICES] = slices
        return model

    return [Transform(Phase.SHARD, cut)]
