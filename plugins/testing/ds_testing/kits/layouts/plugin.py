"""A plugin that cuts the kit's `CutModel` along tp, ep and pp (torch-free).

Load it with ``"plugins": {"load": ["cut_axes=ds_testing.kits.layouts.plugin"]}, "cut_axes":
{"axes": {"tp": 2}}``. Nothing is communicated in forward: the model's loss is a sum over elements.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from ds_run_state.slices import SLICES, Slice

from ds_core.config import Section, option
from ds_core.entries import Axis, Phase, Transform

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.context import Context

LOAD = "cut_axes=ds_testing.kits.layouts.plugin"


class CutAxes(Section):
    """The section ``cut_axes``."""

    axes: dict[str, int] = option(..., "tp, ep and pp to their sizes, 1 or 2; ep is inside dp.")


def ds_config() -> type[CutAxes]:
    """Section ``cut_axes``."""
    return CutAxes


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    """The axes that the section names."""
    section = config.section(CutAxes)
    assert section is not None
    return [
        Axis(name, size, inside="dp" if name == "ep" else None, outermost=name == "pp")
        for name, size in section.axes.items()
    ]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    """The axes of its slice, and pp: each stage has other layers."""
    piece = (ctx.stash.get(SLICES) or {}).get(name)
    return [*(piece.axes if piece is not None else ()), *(["pp"] if ctx.mesh.has("pp") else [])]


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    """Each rank keeps its layers, and its part of them."""
    return [Transform(Phase.SHARD, functools.partial(cut, ctx=ctx))]


def cut(model: Any, ctx: Context) -> nn.Module:
    """Leave this rank's parts of a `CutModel`, and tell of them."""
    from ds_core.partition import COUNTED_ELSEWHERE

    mesh = ctx.mesh
    if mesh.has("pp"):
        stage = mesh.index("pp")
        for number in list(model.layers):
            if int(number) % mesh.size("pp") != stage:
                model.layers.pop(number)
        # Every stage has the tied table; the first one's counts.
        if stage:
            ctx.stash[COUNTED_ELSEWHERE] = {"tied.weight"}
    slices: dict[str, Slice] = {}
    for name, param in model.named_parameters():
        for axis, dim in model.cuts(name):
            if not mesh.has(axis) or mesh.size(axis) == 1:
                continue
            # Uneven, so that sizes of parts are not taken for each other.
            size = param.shape[dim]
            middle = size // 2 if axis == "ep" else size * 3 // 5
            first, last = ((0, middle), (middle, size))[mesh.index(axis)]
            slices[name] = Slice.of(param.shape).cut(axis, dim, first, last - first)
            param.data = slices[name].take(param.data).clone()
    ctx.stash[SLICES] = slices
    model.pieces = slices
    return model  # type: ignore[no-any-return]
