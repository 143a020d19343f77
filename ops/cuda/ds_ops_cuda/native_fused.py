"""The functions of `formulas` by the compiled kernels: CUDA tensors of 32- or 16-bit floats,
contiguous.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_ops_cuda import native
from ds_ops_cuda.native import NONE, TYPES
from ds_ops_cuda.references import keep_scale, threshold


def bias_gelu_forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """See `formulas.bias_gelu_forward`."""
    y = torch.empty_like(x)
    kinds = TYPES[x.dtype], TYPES[bias.dtype]
    addresses = x.data_ptr(), bias.data_ptr(), y.data_ptr()
    native.call("bias_gelu_forward", x.device, *x.shape, *kinds, approximate == "tanh", *addresses)
    return y


def bias_gelu_backward(grad: Tensor, x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    """See `formulas.bias_gelu_backward`."""
    dx = torch.empty_like(x)
    kinds = TYPES[x.dtype], TYPES[bias.dtype]
    addresses = grad.data_ptr(), x.data_ptr(), bias.data_ptr(), dx.data_ptr()
    native.call("bias_gelu_backward", x.device, *x.shape, *kinds, approximate == "tanh", *addresses)
    return dx


def bias_dropout_add_forward(
    x: Tensor, bias: Tensor, residual: Tensor, p: float, seed: int
) -> Tensor:
    """See `formulas.bias_dropout_add_forward`."""
    y = torch.empty_like(x)
    kinds = TYPES[x.dtype], TYPES[bias.dtype]
    addresses = x.data_ptr(), bias.data_ptr(), residual.data_ptr(), y.data_ptr()
    native.call(
        "bias_dropout_add_forward", x.device, *x.shape, *kinds, *addresses, *_dropout(p, seed)
    )
    return y


def dropout(x: Tensor, p: float, seed: int) -> Tensor:
    """See `references.dropout`; x: of any shape."""
    if threshold(p) == 0:
        return x
    y = torch.empty_like(x)
    rows, cols = _matrix(x)
    native.call(
        "dropout",
        x.device,
        rows,
        cols,
        TYPES[x.dtype],
        x.data_ptr(),
        y.data_ptr(),
        *_dropout(p, seed),
    )
    return y


def column_sums(x: Tensor, deterministic: bool) -> Tensor:
    """See `formulas.column_sums`; where not deterministic, chunks of rows add up in the order they
    end in.
    """
    # Deterministic: each chunk of rows has a place of its own, and they are added up in order.
    sums = _room(x, 1, deterministic)
    chunks = _chunks(x.shape[0])
    native.call(
        "column_sums",
        x.device,
        *x.shape,
        TYPES[x.dtype],
        x.data_ptr(),
        sums.data_ptr(),
        chunks,
        not deterministic,
    )
    return sums.sum(0)[0]


def softmax_forward(x: Tensor, mask: Tensor | None, p: float, seed: int) -> tuple[Tensor, Tensor]:
    """See `formulas.softmax_forward`."""
    probs = torch.empty_like(x)
    # Without dropout the two are one tensor, which is kept once.
    dropped = torch.empty_like(x) if threshold(p) else probs
    if mask is not None:
        # Strides of 0 where it broadcasts: the kernel reads it in place.
        mask = mask.expand(x.shape)
    rows, cols = _matrix(x)
    kind, address, strides = (
        (NONE, 0, []) if mask is None else (TYPES[mask.dtype], mask.data_ptr(), [*mask.stride()])
    )
    native.call(
        "softmax_dropout_forward",
        x.device,
        rows,
        cols,
        TYPES[x.dtype],
        kind,
        x.data_ptr(),
        address,
        list(x.shape),
        strides,
        probs.data_ptr(),
        dropped.data_ptr() if threshold(p) else 0,
        *_dropout(p, seed),
    )
    return probs, dropped


def softmax_backward(grad: Tensor, probs: Tensor, p: float, seed: int) -> Tensor:
    """See `formulas.softmax_backward`."""
    dx = torch.empty_like(probs)
    addresses = grad.data_ptr(), probs.data_ptr(), dx.data_ptr()
    rows, cols = _matrix(probs)
    native.call(
        "softmax_dropout_backward",
        dx.device,
        rows,
        cols,
        TYPES[dx.dtype],
        *addresses,
        *_dropout(p, seed),
    )
    return dx


def layer_norm_forward(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """See `formulas.layer_norm_forward`."""
    y = torch.empty_like(x)
    mean, rstd = (torch.empty(x.shape[0], dtype=torch.float32, device=x.device) for _ in range(2))
    addresses = [t.data_ptr() for t in (x, weight, bias, y, mean, rstd)]
    native.call(
        "layer_norm_forward",
        x.device,
        *x.shape,
        TYPES[x.dtype],
        TYPES[weight.dtype],
        *addresses,
        eps,
    )
    return y, mean, rstd


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
    """See `formulas.layer_norm_backward`, and `column_sums` on deterministic."""
    dx = torch.empty_like(kept)
    given = (*kept.shape, TYPES[kept.dtype], TYPES[weight.dtype], invertible)
    addresses = [t.data_ptr() for t in (grad, kept, weight, bias, mean, rstd)]
    native.call("layer_norm_backward", kept.device, *given, *addresses, dx.data_ptr())
    sums = _room(kept, 2, deterministic)
    chunks = _chunks(kept.shape[0])
    native.call(
        "layer_norm_sums",
        kept.device,
        *given,
        *addresses,
        sums.data_ptr(),
        chunks,
        not deterministic,
    )
    dw, db = sums.sum(0)
    return dx, dw, db


def _dropout(p: float, seed: int) -> tuple[int, int, float]:
    return seed, threshold(p), keep_scale(p)


def _matrix(x: Tensor) -> tuple[int, int]:
    cols = x.shape[-1]
    return (x.numel() // cols if cols else 0), cols


def _chunks(rows: int) -> int:
    """Into how many chunks rows are cut for their sums: enough blocks for a device, few enough to
    add up quickly.
    """
    return min(max(rows // 64, 1), 128)


def _room(x: Tensor, values: int, deterministic: bool) -> Tensor:
    """Where sums of columns go: a place for each chunk, or one for all, which starts as zeros."""
    if deterministic:
        return torch.empty(
            _chunks(x.shape[0]), values, x.shape[1], dtype=torch.float32, device=x.device
        )
    return torch.zeros(1, values, x.shape[1], dtype=torch.float32, device=x.device)
