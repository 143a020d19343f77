"""The attributes of parameters that DeepSpeed documents for stage 3: ``ds_id``, ``ds_tensor``, ..."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ds_zero.comm.hierarchy import sharding_axes
from ds_zero.init.sharded_param import describe, mark_in_place

if TYPE_CHECKING:
    from ds_zero.base import ZeroPartitioner


def describe_all(owner: ZeroPartitioner, module: nn.Module) -> None:
    """Set the documented attributes of every parameter, also of those that no optimizer updates and
    no rank cuts.

    Programs look for them at stage 3 however a parameter is kept.
    """
    for bucket in owner.buckets:
        for fragment in bucket.fragments:
            place = (torch.Size(fragment.shape), bucket.weights.parts[fragment.index])
            unsharded = not bucket.weights.sharded
            describe(fragment.param, fragment.name, *place, unsharded=unsharded)
    mesh = owner.ctx.mesh
    # Those in no bucket: the part that this rank would have.
    for param in module.parameters():
        if param not in owner.bucket_of:
            info = owner.ctx.params[param]
            axes = sharding_axes(mesh, info.replicas)
            part = _part(param, mesh.index(*axes), mesh.size(*axes))
            describe(param, info.name, param.shape, part, unsharded=True)
            mark_in_place(param)


def _part(param: nn.Parameter, index: int, ranks: int) -> Tensor:
    """The elements of a replicated parameter that rank `index` would have: a view of it, where it
    is contiguous.
    """
    flat = param.data.reshape(-1)
    each = -(-param.numel() // ranks)
    return flat[index * each : (index + 1) * each]
