"""A plugin that leaves each rank a part of the parameters whose names begin with ``rows`` (over the axis ``ep``),
``columns`` (over ``tp``, unevenly) and ``both``."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from ds_run_state.slices import SLICES, Slice

from ds_core.entries import Axis, Phase, Transform

if TYPE_CHECKING:
    from pydantic import BaseModel

    from ds_core.config import RunConfig
    from ds_core.context import Context


def ds_config() -> type[BaseModel]:
    from ds_core.config import Section

    class Slices(Section):
        ep: int = 1
        tp: int = 1

    return Slices


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    section: Any = config.section("slices")
    return [Axis("tp", section.tp), Axis("ep", section.ep, inside="dp")]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    found = (ctx.stash.get(SLICES) or {}).get(name)
    return () if found is None else found.axes


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    def cut(model: Any) -> Any:
        slices = {}
        for name, param in model.named_parameters():
            piece = Slice.of(param.shape)
            if name.startswith(("rows", "both")):
                share = param.shape[0] // ctx.mesh.size("ep")
                piece = piece.cut("ep", 0, ctx.mesh.index("ep") * share, share)
            if name.startswith(("columns", "both")):
                index, bounds = ctx.mesh.index("tp"), {1: [0, 7], 2: [0, 1, 7], 4: [0, 1, 3, 5, 7]}[ctx.mesh.size("tp")]
                piece = piece.cut("tp", 1, bounds[index], bounds[index + 1] - bounds[index])
            if piece.axes:
                slices[name] = piece
                param.data = piece.take(param.data).clone()
        ctx.stash[SLICES] = slices
        return model

    return [Transform(Phase.SHARD, cut)]
