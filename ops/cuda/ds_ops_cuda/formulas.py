"""Forward and backward of the fused operations as formulas in plain torch: the path where no kernel
serves.

Each function has a twin of the same name in `native_fused`. `x` and what has its shape is [rows,
cols] and contiguous.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from ds_ops_cuda.references import dropout as dropout
from ds_ops_cuda.references import wide


def bias_gelu_forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """[rows, cols]."""
    return F.gelu(wide(x) + wide(bias), approximate=approximate).to(x.dtype)


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """The gradient of x, [rows, cols]."""
    z = wide(x) + wide(bias)
    # d/dz of 0.5 z (1 + tanh(k (z + 0.044715 z^3))), Hendrycks and Gimpel 2016.
    if approximate == "tanh":
        k = math.sqrt(2 / math.pi)
        t = torch.tanh(k * (z + 0.044715 * z**3))
        slope = 0.5 * (1 + t) + 0.5 * z * (1 - t * t) * k * (1 + 3 * 0.044715 * z * z)
    else:
        slope = 0.5 * (1 + torch.erf(z / math.sqrt(2))) + z * torch.exp(-0.5 * z * z) / math.sqrt(
            2 * math.pi
        )
    return (wide(grad) * slope).to(x.dtype)


def bias_dropout_add_forward(
    x: Tensor, bias: Tensor, residual: Tensor, p: float, seed: int
) -> Tensor:
    """[rows, cols]."""
    return (dropout(wide(x) + wide(bias), p, seed) + wide(residual)).to(x.dtype)


def column_sums(x: Tensor, deterministic: bool) -> Tensor:
    """[cols], in fp32 (or fp64)."""
    del deterministic
    return wide(x).sum(0)


def softmax_forward(x: Tensor, mask: Tensor | None, p: float, seed: int) -> tuple[Tensor, Tensor]:
    """Probabilities, and those after dropout (the same tensor where p is 0).

    x: [b, h, q, k]; mask broadcasts to it.
    """
    probs = F.softmax(wide(x) if mask is None else wide(x) + wide(mask), -1).to(x.dtype)
    return probs, dropout(probs, p, seed)


def softmax_backward(grad: Tensor, probs: Tensor, p: float, seed: int) -> Tensor:
    """The gradient of the scores, from that of the dropped probabilities."""
    # Dropout is linear: its gradient is the same mask and scale.
    g = dropout(wide(grad), p, seed)
    y = wide(probs)
    return (y * (g - (g * y).sum(-1, keepdim=True))).to(probs.dtype)


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, and each row's mean and 1 / standard deviation."""
    z = wide(x)
    mean = z.mean(-1)
    centred = z - mean[:, None]
    rstd = 1 / (centred.square().mean(-1) + eps).sqrt()
    return (centred * rstd[:, None] * wide(weight) + wide(bias)).to(x.dtype), mean, rstd


def layer_norm_backward(
    grad: Tensor,
    kept: Tensor,
    weight: Tensor,
    bias: Tensor,
    mean: Tensor,
    rstd: Tensor,
    invertible: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, weight and bias (the last two in fp32 or fp64).

    kept: the input, or the output.
    """
    del deterministic
    g = wide(grad)
    w = wide(weight)
    # The normalised input, from the input or, by inverting weight and bias, from the output.
    normal = (
        (wide(kept) - wide(bias)) / w
        if invertible
        else (wide(kept) - mean[:, None]) * rstd[:, None]
    )
    slope = g * w
    # What mean and variance have of each element's gradient is taken off.
    means = slope.mean(-1, keepdim=True), (slope * normal).mean(-1, keepdim=True)
    dx = rstd[:, None] * (slope - means[0] - normal * means[1])
    return dx.to(grad.dtype), (g * normal).sum(0), g.sum(0)
