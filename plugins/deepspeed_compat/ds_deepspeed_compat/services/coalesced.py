"""``deepspeed.runtime.comm.coalesced_collectives``: one reduce-scatter for a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ds_core import comm


def reduce_scatter_coalesced(tensors: Sequence[Tensor], group: Any = None) -> list[Tensor]:
    """This rank's flat part of the mean over ranks, for each tensor: ceil(elements / ranks)
    elements, the last less.

    Collective over the group.
    """
    ranks = comm.world_size(group)
    rank = comm.rank(group)
    sizes = [math.ceil(tensor.numel() / ranks) for tensor in tensors]
    if not tensors:
        return []

    # Row r of the buffer holds the parts of all tensors that rank r is left with; parts are padded
    # to equal sizes.
    buffer = tensors[0].new_zeros(ranks, sum(sizes))
    at = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        flat = torch.zeros(ranks * size, dtype=buffer.dtype, device=buffer.device)
        flat[: tensor.numel()] = tensor.detach().reshape(-1)
        buffer[:, at : at + size] = flat.view(ranks, size)
        at += size

    mine = buffer.new_empty(sum(sizes))
    comm.reduce_scatter_tensor(mine, buffer.div_(ranks).flatten(), group=group)
    parts = []
    at = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        length = max(0, min(size, tensor.numel() - rank * size))
        parts.append(mine[at : at + length])
        at += size
    return parts
