"""Pairs of linear layers, of which each rank has some rows of the first and the columns of the second that fit them."""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ds_comm_autograd import copy_to, reduce_from
from ds_run_state.changes import Shared, changing, gather_slices
from ds_run_state.slices import SLICES, Slice
from torch import Tensor, nn

from ds_core import comm
from ds_core.context import Context
from ds_core.errors import UsageError
from ds_core.undo import Undo


class Up(nn.Linear):
    """Some rows: a part of the outputs. The gradients of its inputs are added up over the ranks."""

    group: Shared

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(copy_to(x, self.group.value))


class Down(nn.Linear):
    """Some columns, for a part of the inputs. Outputs are added up over the ranks; the bias is added once."""

    group: Shared

    def forward(self, x: Tensor) -> Tensor:
        out = reduce_from(nn.functional.linear(x, self.weight), self.group.value)
        return out if self.bias is None else out + self.bias


def divide(model: nn.Module, ctx: Context, pairs: Sequence[tuple[str, str]]) -> nn.Module:
    """Leave this rank its part of each pair. Raises UsageError for a name that is no linear layer of the model.

    When the engine is destroyed the weights are gathered, and the layers are what they were.
    """
    undo = Undo()
    ctx.undo(undo.run, collective=True)
    with changing(model, undo):
        pieces = cut(model, ctx, pairs)
    undo(functools.partial(gather_slices, pieces, ctx.mesh, "old_divided_layers"))
    return model


def cut(model: nn.Module, ctx: Context, pairs: Sequence[tuple[str, str]]) -> dict[nn.Parameter, Slice]:
    """What this rank has of each parameter of the pairs."""
    pieces: dict[nn.Parameter, Slice] = {}
    mesh, axis = ctx.mesh, "old_divided_layers"
    size, index, group = mesh.size(axis), mesh.index(axis), mesh.group(axis)
    # Ranks may have made different weights; all take parts of the first one's.
    for tensor in (*model.parameters(), *model.buffers()):
        comm.broadcast(tensor.data, src=mesh.ranks(axis)[0], group=group)
    layers, known = dict(model.named_modules()), ctx.stash.get(SLICES)
    slices = dict(known) if known is not None else {}
    for names in pairs:
        for name, cls in zip(names, (Up, Down), strict=True):
            layer = layers.get(name)
            if not isinstance(layer, nn.Linear):
                raise UsageError(f"old_divided_layers: {name!r} is not a linear layer of {list(layers)[1:]}")
            width = layer.out_features if cls is Up else layer.in_features
            first, last = width * index // size, width * (index + 1) // size
            for key, param in layer.named_parameters():
                if cls is Down and key == "bias":
                    continue
                piece = Slice.of(param.shape).cut(axis, 0 if cls is Up else 1, first, last - first)
                param.data = piece.take(param.data).clone()  # the parameter stays: an optimizer may know it
                slices[f"{name}.{key}"] = pieces[param] = piece
            layer.__class__ = cls
            layer.group = Shared(group)  # type: ignore[assignment]
    ctx.stash[SLICES] = slices
    return pieces
