"""Which elements of a tensor are recorded: all of a small one, an even sample of a large one.

The sample is chosen by places in the *full* tensor, so that the shards of any layout have parts of
one sample, which can be put together and compared.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ds_run_state.slices import Box


def stride_of(numel: int, limit: int) -> int:
    """The distance between two recorded elements of a flattened tensor of `numel` elements."""
    stride = -(-numel // limit)
    # An odd stride meets all columns of a matrix whose rows have a power of two.
    return stride + 1 if stride > 1 and stride % 2 == 0 else stride


def sample_size(shape: Sequence[int], limit: int) -> int:
    """How many elements of a full tensor are recorded."""
    numel = math.prod(shape)
    return -(-numel // stride_of(numel, limit)) if numel else 0


def sample_range(values: Tensor, start: int, numel: int, limit: int) -> tuple[Tensor, int]:
    """The sample's part in a range of a flattened tensor of `numel` elements.

    values: the elements from `start` on, of any shape.

    Returns the elements, copied to the host, and the place of the first of them in the sample.
    """
    stride = max(stride_of(numel, limit), 1)
    first = -(-start // stride)
    found = values.detach().reshape(-1)[first * stride - start :: stride]
    return _on_host(found), first


def sample_box(
    values: Tensor, start: int, box: Box, shape: Sequence[int], limit: int
) -> tuple[Tensor, Tensor]:
    """The same of a range of a flattened box of a tensor of `shape`, with the places of all of its
    elements in the sample.
    """
    stride = max(stride_of(math.prod(shape), limit), 1)
    flat = values.detach().reshape(-1)
    rest = torch.arange(start, start + flat.numel())
    place = torch.zeros_like(rest)
    step = 1
    # From the last dimension to the first: the index in the box, and from it that in the tensor.
    for first, size, whole in zip(
        reversed(box.first), reversed(box.size), reversed(tuple(shape)), strict=True
    ):
        place += (rest % size + first) * step
        rest = rest // size
        step *= whole
    chosen = place % stride == 0
    return _on_host(flat[chosen.to(flat.device)]), place[chosen] // stride


def _on_host(values: Tensor) -> Tensor:
    """A copy on the host, in a floating dtype."""
    copy = values.to("cpu", copy=True).contiguous()
    return copy if copy.is_floating_point() else copy.double()
