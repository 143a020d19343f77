"""A plugin that divides pairs of layers among ranks, for the tests of the kit; `fault` plants one
(torch-free).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from ds_run_state.slices import SLICES, Slice

from ds_core.config import Section
from ds_core.entries import Axis, Phase, Transform
from ds_core.undo import Undo

if TYPE_CHECKING:
    from torch import nn

    from ds_core.config import RunConfig
    from ds_core.context import Context


class Settings(Section):
    """The section ``divided_layers``."""

    size: int = 1
    fault: str = ""


def ds_config() -> type[Settings]:
    return Settings


def ds_mesh_axes(config: RunConfig) -> Iterable[Axis]:
    settings: Any = config.section("divided_layers")
    return [Axis("divided", settings.size)]


def ds_param_axes(name: str, ctx: Context) -> Collection[str]:
    settings: Any = ctx.config.section("divided_layers")
    if settings.fault == "axes":
        return ()
    piece = (ctx.stash.get(SLICES) or {}).get(name)
    if settings.fault == "slices" and name.split(".")[0] in ("up", "down"):
        return () if name == "down.bias" else ("divided",)
    return () if piece is None else piece.axes


def ds_transforms(ctx: Context) -> Iterable[Transform]:
    return [Transform(Phase.SHARD, functools.partial(divide, ctx=ctx))]


def divide(model: Any, ctx: Context) -> nn.Module:
    """Each rank keeps some rows of `up` and the columns of `down` that take what they give."""
    from ds_run_state.changes import changing

    fault = ctx.config.section("divided_layers").fault  # type: ignore[union-attr]
    undo = Undo()
    if fault != "stays":
        ctx.undo(undo.run, collective=True)
    with changing(model, undo):
        return _divide(model, ctx, fault, undo)


def _divide(model: Any, ctx: Context, fault: str, undo: Undo) -> nn.Module:
    import divided_modules
    from ds_run_state.changes import Shared, gather_slices
    from torch import nn

    from ds_core import comm

    mesh = ctx.mesh
    pieces: dict[nn.Parameter, Slice] = {}
    size = mesh.size("divided")
    index = mesh.index("divided")
    group = mesh.group("divided")
    if fault != "start":
        for param in model.parameters():
            comm.broadcast(param.data, src=mesh.ranks("divided")[0], group=group)
    known = ctx.stash.get(SLICES)
    slices = dict(known) if known is not None else {}
    width = model.up.out_features
    first = width * index // size
    last = width * (index + 1) // size
    for name, dim in (("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        param = model.get_parameter(name)
        piece = Slice.of(param.shape).cut("divided", dim, first, last - first)
        part = piece.take(param.data).clone()
        if fault == "new":
            layer, _, key = name.partition(".")
            setattr(model.get_submodule(layer), key, nn.Parameter(part, param.requires_grad))
        else:
            param.data = part
            pieces[param] = piece
        if fault != "slices":
            slices[name] = piece
    ctx.stash[SLICES] = slices
    undo(lambda: gather_slices(pieces, mesh, "divided"))
    model.up.__class__ = divided_modules.Up
    model.down.__class__ = divided_modules.Down
    for layer in (model.up, model.down):
        layer.group = Shared(group)
        layer.fault = fault
    return model  # type: ignore[no-any-return]
