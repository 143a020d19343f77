"""Values rounded to few levels, and back to floating point: what a layer would see if it were
stored in few bits.

All functions are given the rows of a matrix, each with a scale of its own, and return new values of
the same shape and dtype. They calculate in fp32 (fp64 for fp64). A row that is all zero stays so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def quantise_rows(rows: Tensor, bits: int, symmetric: bool, noise: Tensor | None = None) -> Tensor:
    """`rows`, each rounded to the 2**bits levels of its own range; 2 bits are -a, 0, a and 1 bit is
    -a, a.

    noise: in [-0.5, 0.5), added before rounding to the nearest level: stochastic rounding. It has
    no effect below three bits. symmetric: levels around zero; else between the least and the
    greatest value, one of them zero.
    """
    wide = widened(rows)
    if bits == 1:
        quantised = wide.sign() * wide.abs().mean(-1, keepdim=True)
    elif bits == 2:
        quantised = _ternary(wide)
    elif symmetric:
        quantised = in_range(
            wide,
            -wide.abs().amax(-1, keepdim=True),
            wide.abs().amax(-1, keepdim=True),
            bits,
            True,
            noise,
        )
    else:
        quantised = in_range(
            wide, wide.amin(-1, keepdim=True), wide.amax(-1, keepdim=True), bits, False, noise
        )
    return quantised.to(rows.dtype)


def widened(values: Tensor) -> Tensor:
    """`values` in the dtype to calculate in: fp32, or fp64 for fp64."""
    return values if values.dtype == torch.float64 else values.float()


def in_range(
    values: Tensor,
    low: Tensor,
    high: Tensor,
    bits: int,
    symmetric: bool,
    noise: Tensor | None = None,
) -> Tensor:
    """`values` (see `widened`), rounded to the 2**bits levels of the range from `low` to `high`,
    which broadcast.

    symmetric: level k is k * scale, for k from -2**(bits-1) to 2**(bits-1) - 1, scale = 2
    max(|low|, |high|) / 2**bits. Else level k is k * scale + zero, for k from 0 to 2**bits - 1,
    scale = (high - low) / 2**bits and zero the multiple of scale nearest to low.
    """
    levels = 2**bits
    if symmetric:
        scale = 2 * torch.maximum(low.abs(), high.abs()) / levels
        zero = torch.zeros_like(scale)
        least = -levels // 2
        greatest = levels // 2 - 1
    else:
        scale = (high - low) / levels
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        # One level is exactly zero, so that pruned weights stay pruned.
        zero = (low / scale).round() * scale
        least = 0
        greatest = levels - 1
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    places = (values - zero) / scale
    if noise is not None:
        places = places + noise
    return places.round().clamp(least, greatest) * scale + zero


def _ternary(wide: Tensor) -> Tensor:
    """-a, 0 or a per row: zero below 0.7 of the mean absolute value, a the mean of the others (Li
    et al., 2016).
    """
    sizes = wide.abs()
    large = sizes > 0.7 * sizes.mean(-1, keepdim=True)
    mean = (sizes * large).sum(-1, keepdim=True) / large.sum(-1, keepdim=True).clamp(min=1)
    return wide.sign() * large * mean


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch.compile cannot trace a generator
def noise_for(like: Tensor, seed: int) -> Tensor:
    """Numbers in [-0.5, 0.5) of the shape of `like`: the same on all ranks, and when a forward is
    run again.
    """
    generator = torch.Generator(like.device).manual_seed(seed)
    return torch.rand(like.shape, generator=generator, device=like.device) - 0.5


class StraightThrough(torch.autograd.Function):
    """``function(values)``, with gradients as if it had changed nothing."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """New values, of the same shape and dtype."""
        return function(values.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """`grad`, unchanged."""
        return grad, None
