"""What a compiled kernel computes, told to those who count it: torch's dispatcher does not see
inside.

`tell` calls an operation of torch that does nothing, ``ds_kernel_kit::work``. Dispatch modes see
it, such as ``torch.utils.flop_counter.FlopCounterMode`` and dscore-flops-profiler.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

_NAME = "ds_kernel_kit::work"
torch.library.define(_NAME, "(Tensor like, int macs, int elements) -> ()")


@torch.library.impl(_NAME, "CompositeExplicitAutograd")
def _work(like: Tensor, macs: int, elements: int) -> None:
    """Nothing."""


@register_flop_formula(torch.ops.ds_kernel_kit.work, get_raw=True)
def _flops(like: Tensor, macs: int, elements: int, **_: Any) -> int:
    return 2 * macs  # torch's counter counts products alone


def watched() -> bool:
    """Whether a dispatch mode is on, so that somebody may count."""
    return bool(torch._C._len_torch_dispatch_stack())


def tell(like: Tensor, macs: int, elements: int = 0) -> None:
    """A kernel does so many multiply-accumulates, and an activation or the like of so many
    elements.

    like: a tensor that it was given. To be called where `watched`, in the forward and the backward
    that run the kernel.
    """
    torch.ops.ds_kernel_kit.work(like, macs, elements)
