"""The transform of MoE layers: bind them to the mesh, and declare which slices of parameters this
rank has.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from ds_run_state.slices import SLICES, Slice

from ds_core.context import StashKey
from ds_core.errors import UsageError
from ds_moe.expert_load import EXPERT_LOADS
from ds_moe.experts import partition_dim
from ds_moe.layer import MoE

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ds_core.context import Context
    from ds_core.mesh import Mesh

EXPERT_PARALLEL: StashKey[Collection[str]] = StashKey(
    "dscore-moe expert-parallel parameters and buffers"
)
"""Names of parameters and buffers that exist on some ranks along ``ep`` only, because they are
named by expert. Stacked experts, of which each rank has a slice (`ds_run_state.slices`), are not
listed."""

TENSOR_PARALLEL: StashKey[set[str]] = StashKey("dscore-moe tensor-parallel experts")
"""Names of expert parameters and buffers that are sharded over ``tp`` too, in a way that is not
declared.
"""


def bind_layers(model: nn.Module, ctx: Context) -> nn.Module:
    """Bind each MoE layer to its group; the model does not change.

    Raises UsageError for an ep_size without an axis.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    known = ctx.stash.get(SLICES)
    slices = dict(known) if known is not None else {}
    cut = set(ctx.stash.get(TENSOR_PARALLEL) or ())
    others = ctx.stash.get(EXPERT_LOADS)
    size = ctx.mesh.size("ep")
    loads = dict(others) if others is not None else {}
    for name, layer in layers.items():
        ctx.undo(layer.unbind)
        # One mesh has one axis ep: layers are sharded over all of it, or not at all.
        if layer.ep_size not in (1, size):
            raise UsageError(
                f"MoE layer {name!r} has ep_size {layer.ep_size}, and the mesh "
                f"{ctx.mesh.describe()} has ep {size}; "
                f"use 1 or one size for all layers (expert_parallel.autoep_size is {size})"
            )
        loads[name] = layer.bind(ctx.mesh.group("ep") if layer.ep_size > 1 else None, ctx.kernels)
        prefix = f"{name}.experts." if name else "experts."
        for key, tensor in (*layer.experts.named_parameters(), *layer.experts.named_buffers()):
            dim = partition_dim(tensor) if layer.expert_tensor_parallel else -1
            piece = _piece(layer, tensor, -1 if dim is None else dim, ctx.mesh)
            # Declared slices can be saved, gathered and loaded at another size; of the others only
            # the axis is known.
            if piece.axes:
                slices[prefix + key] = piece
            if dim is None:
                cut.add(prefix + key)
    ctx.stash[SLICES] = slices
    ctx.stash[TENSOR_PARALLEL] = cut
    ctx.stash[EXPERT_LOADS] = loads
    return model


def _piece(layer: MoE, tensor: Tensor, dim: int, mesh: Mesh) -> Slice:
    """This rank's slice of stacked experts.

    dim: of `tensor`, sharded evenly over ``tp``; -1: none.
    """
    tp = mesh.size("tp") if dim >= 0 and mesh.has("tp") else 1
    # The full shape first: all experts, and the sharded dimension of all tp ranks.
    shape = [layer.num_experts, *tensor.shape[1:]]
    shape[dim] *= tp
    piece = Slice.of(shape)
    if layer.ep_size > 1:
        piece = piece.cut(
            "ep", 0, mesh.index("ep") * layer.num_local_experts, layer.num_local_experts
        )
    if tp > 1:
        piece = piece.cut("tp", dim, mesh.index("tp") * tensor.shape[dim], tensor.shape[dim])
    return piece
