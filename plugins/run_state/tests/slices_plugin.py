"""A plugin that leaves each rank a part of the parameters whose names begin with ``rows`` (over the
axis ``ep``), ``columns`` (over ``tp``, unevenly) and ``both``; and, of each of the 6, 2 and 2 rows
or columns of ``fused`` ones."""

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


def part(first: int, size: int, ctx: Context) -> tuple[int, int]:
    index = ctx.mesh.index("tp")
    count = ctx.mesh.size("tp")
    low = -(-size * index // count)
    high = -(-size * (index + 1) // count)
    return first + low, high - low


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    def cut(model: Any) -> Any:
        slices = {}
        for name, param in model.named_parameters():
            piece = Slice.of(param.shape)
            if name.startswith(("rows", "both")):
                share = param.shape[0] // ctx.mesh.size("ep")
                piece = piece.cut("ep", 0, ctx.mesh.index("ep") * share, share)
            if name.startswith(("columns", "both")):
                index = ctx.mesh.index("tp")
                bounds = {1: [0, 7], 2: [0, 1, 7], 4: [0, 1, 3, 5, 7]}[ctx.mesh.size("tp")]
                piece = piece.cut("tp", 1, bounds[index], bounds[index + 1] - bounds[index])
            if name.startswith("fused"):
                if name == "fused_both":
                    piece = piece.cut(
                        "ep",
                        0,
                        ctx.mesh.index("ep") * 4 // ctx.mesh.size("ep"),
                        4 // ctx.mesh.size("ep"),
                    )
                if ctx.mesh.size("tp") > 1:
                    ranges = [part(first, size, ctx) for first, size in ((0, 6), (6, 2), (8, 2))]
                    piece = piece.keep("tp", param.shape.index(10), ranges)
            if piece.axes:
                slices[name] = piece
                param.data = piece.take(param.data).clone()
        ctx.stash[SLICES] = slices
        return model

    return [Transform(Phase.SHARD, cut)]
