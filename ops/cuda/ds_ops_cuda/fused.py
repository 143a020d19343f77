"""The fused operations with gradients: by kernels for CUDA tensors, else by formulas; either keeps
as little as it can.

`references` says what each means. What is kept for the backward pass: bias_gelu its input;
bias_dropout_add nothing but its seed; layer_norm its input or, where invertible, its output;
softmax_dropout the probabilities. `attention` and `gelu_linear` take the matrix product that
follows along, which lets them make its input anew instead of keeping it.
"""

from __future__ import annotations

import functools
import logging
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ds_core.errors import UsageError
from ds_ops_cuda import formulas, native_fused
from ds_ops_cuda.extension import available
from ds_ops_cuda.native import TYPES, serves

log = logging.getLogger("ds_ops_cuda")

# An output from which the input is worked out loses at most this many roundings' worth.
_MOST_LOST = 16


def bias_gelu(
    x: Tensor, bias: Tensor, *, approximate: str = "tanh", deterministic: bool = True
) -> Tensor:
    """See `references.bias_gelu`."""
    _check("bias_gelu", x, bias=bias)
    return _apply(_BiasGelu, x, bias, approximate, deterministic)


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    *,
    eps: float,
    invertible: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """See `references.layer_norm`.

    invertible: keep the output, from which the input is worked out; where that would lose precision
    (a weight that is zero, or below 1/16 of its bias) the input is kept all the same. Looking at
    the weights waits for the device.
    """
    _check("layer_norm", x, weight=weight, bias=bias)
    # Dividing by a small weight would blow the output's rounding up.
    inverts = invertible and bool(((weight != 0) & (weight.abs() * _MOST_LOST >= bias.abs())).all())
    return _apply(_LayerNorm, x, weight, bias, eps, inverts, deterministic)


def softmax_dropout(
    x: Tensor, mask: Tensor | None = None, *, p: float = 0.0, seed: int = 0
) -> Tensor:
    """See `references.softmax_dropout`."""
    _check_mask(x, mask)
    return _apply(_SoftmaxDropout, x, mask, p, seed)


def bias_dropout_add(
    x: Tensor,
    bias: Tensor,
    residual: Tensor,
    *,
    p: float = 0.0,
    seed: int = 0,
    deterministic: bool = True,
) -> Tensor:
    """See `references.bias_dropout_add`."""
    _check("bias_dropout_add", x, bias=bias)
    if residual.shape != x.shape or residual.dtype != x.dtype:
        raise UsageError(
            f"bias_dropout_add: residual is {residual.dtype} {list(residual.shape)}, x is "
            f"{x.dtype} {list(x.shape)}; "
            "they must be the same"
        )
    return _apply(_BiasDropoutAdd, x, bias, residual, p, seed, deterministic)


def attention(
    scores: Tensor,
    mask: Tensor | None,
    value: Tensor,
    *,
    p: float = 0.0,
    seed: int = 0,
    recompute: bool = False,
) -> Tensor:
    """``softmax_dropout(scores, mask) @ value``: [b, h, q, d].

    recompute: do not keep the probabilities after dropout for the backward pass, but draw it again.
    """
    _check_mask(scores, mask)
    return _apply(_Attention, scores, mask, value, p, seed, recompute)


def gelu_linear(
    x: Tensor,
    bias: Tensor,
    weight: Tensor,
    *,
    approximate: str = "tanh",
    recompute: bool = False,
    deterministic: bool = True,
) -> Tensor:
    """``bias_gelu(x, bias) @ weight.T``: [..., out].

    weight: [out, cols]; recompute: do not keep GELU's output.
    """
    _check("gelu_linear", x, bias=bias)
    return _apply(_GeluLinear, x, bias, weight, approximate, recompute, deterministic)


def _apply(function: Any, *arguments: object) -> Tensor:
    out: Tensor = function.apply(*arguments)
    return out


# -- gradients -------------------------------------------------------------------------------------


class _BiasGelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, approximate: str, deterministic: bool) -> Tensor:
        ctx.save_for_backward(x, bias)
        ctx.options = approximate, deterministic
        rows = _rows(x)
        bias = bias.contiguous()
        y: Tensor = _by(rows, bias).bias_gelu_forward(rows, bias, approximate)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias = ctx.saved_tensors
        dx, db = _gelu_gradients(
            _rows(grad), x, bias, *ctx.options, wants_bias=ctx.needs_input_grad[1]
        )
        return dx, db, None, None


def _gelu_gradients(
    grad: Tensor,
    x: Tensor,
    bias: Tensor,
    approximate: str,
    deterministic: bool,
    *,
    wants_bias: bool,
) -> tuple[Tensor, Tensor | None]:
    rows = _rows(x)
    by = _by(rows, bias, grad)
    dx: Tensor = by.bias_gelu_backward(grad, rows, bias.contiguous(), approximate)
    # The bias is added before GELU, so its gradient is that of x, summed over rows.
    db = by.column_sums(dx, deterministic).to(bias.dtype) if wants_bias else None
    return dx.view(x.shape), db


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        eps: float,
        invertible: bool,
        deterministic: bool,
    ) -> Tensor:
        rows = _rows(x)
        weight = weight.contiguous()
        bias = bias.contiguous()
        y, mean, rstd = _by(rows, weight, bias).layer_norm_forward(rows, weight, bias, eps)
        y = y.view(x.shape)
        ctx.save_for_backward(y if invertible else x, weight, bias, mean, rstd)
        ctx.options = invertible, deterministic
        out: Tensor = y
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, bias, mean, rstd = ctx.saved_tensors
        g = _rows(grad)
        rows = _rows(kept)
        dx, dw, db = _by(rows, weight, bias, g).layer_norm_backward(
            g, rows, weight, bias, mean, rstd, *ctx.options
        )
        return dx.view(grad.shape), dw.to(weight.dtype), db.to(bias.dtype), None, None, None


class _SoftmaxDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor | None, p: float, seed: int) -> Tensor:
        x = x.contiguous()
        probs, dropped = _by(x, *_some(mask)).softmax_forward(x, mask, p, seed)
        ctx.save_for_backward(probs)
        ctx.dropout = p, seed
        out: Tensor = dropped
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (probs,) = ctx.saved_tensors
        grad = grad.contiguous()
        return _by(probs, grad).softmax_backward(grad, probs, *ctx.dropout), None, None, None


class _BiasDropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        residual: Tensor,
        p: float,
        seed: int,
        deterministic: bool,
    ) -> Tensor:
        rows = _rows(x)
        other = _rows(residual)
        bias = bias.contiguous()
        ctx.options = p, seed, deterministic, bias.dtype
        y: Tensor = _by(rows, bias, other).bias_dropout_add_forward(rows, bias, other, p, seed)
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        p, seed, deterministic, bias_dtype = ctx.options
        rows = _rows(grad)
        by = _by(rows)
        dx = by.dropout(rows, p, seed)
        db = by.column_sums(dx, deterministic).to(bias_dtype) if ctx.needs_input_grad[1] else None
        return dx.view(grad.shape), db, grad, None, None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        mask: Tensor | None,
        value: Tensor,
        p: float,
        seed: int,
        recompute: bool,
    ) -> Tensor:
        scores = scores.contiguous()
        probs, dropped = _by(scores, *_some(mask)).softmax_forward(scores, mask, p, seed)
        ctx.save_for_backward(probs, value, None if recompute else dropped)
        ctx.dropout = p, seed
        out: Tensor = dropped @ value
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        probs, value, dropped = ctx.saved_tensors
        if dropped is None:
            # The mask is a function of the seed, so it is drawn again and never kept.
            dropped = _by(probs).dropout(probs, *ctx.dropout)
        dvalue = dropped.transpose(-1, -2) @ grad
        ddropped = (grad @ value.transpose(-1, -2)).contiguous()
        dscores = _by(probs, ddropped).softmax_backward(ddropped, probs, *ctx.dropout)
        return dscores, None, dvalue, None, None, None


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        bias: Tensor,
        weight: Tensor,
        approximate: str,
        recompute: bool,
        deterministic: bool,
    ) -> Tensor:
        rows = _rows(x)
        bias = bias.contiguous()
        y: Tensor = _by(rows, bias).bias_gelu_forward(rows, bias, approximate)
        ctx.save_for_backward(x, bias, weight, None if recompute else y)
        ctx.options = approximate, deterministic
        return (y @ weight.t()).view(*x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, bias, weight, y = ctx.saved_tensors
        grad = _rows(grad)
        if y is None:
            rows = _rows(x)
            # Not kept: GELU's output is made again, for the weight's gradient.
            y = _by(rows, bias).bias_gelu_forward(rows, bias, ctx.options[0])
        dw = grad.t() @ y
        dx, db = _gelu_gradients(
            _rows(grad @ weight), x, bias, *ctx.options, wants_bias=ctx.needs_input_grad[1]
        )
        return dx, db, dw, None, None, None


# -- helpers ---------------------------------------------------------------------------------------


def _by(x: Tensor, *others: Tensor) -> ModuleType:
    """Who works on these tensors: the kernels or the formulas."""
    device = x.device
    if not serves(device) or any(t.dtype not in TYPES or t.device != device for t in (x, *others)):
        return formulas
    reason = available()
    if reason is not None:
        _say(reason)
        return formulas
    return native_fused


@functools.cache
def _say(reason: str) -> None:
    log.warning("fused operations run on plain torch: %s", reason)


def _rows(x: Tensor) -> Tensor:
    """As a contiguous matrix [rows, cols]."""
    return x.reshape(x.numel() // x.shape[-1] if x.shape[-1] else 0, x.shape[-1]).contiguous()


def _some(mask: Tensor | None) -> tuple[Tensor, ...]:
    return () if mask is None else (mask,)


def _check(op: str, x: Tensor, **lines: Tensor) -> None:
    """UsageError unless `lines` have one element for each column of x."""
    for name, line in lines.items():
        if x.dim() == 0 or line.shape != x.shape[-1:]:
            raise UsageError(
                f"{op}: {name} is {list(line.shape)}, x is {list(x.shape)}; {name} must be x's "
                "last dim"
            )


def _check_mask(x: Tensor, mask: Tensor | None) -> None:
    if mask is None:
        return
    if mask.requires_grad:
        raise UsageError(
            "softmax_dropout: the mask needs a gradient, which is not worked out; pass "
            "mask.detach()"
        )
    # Broadcasting aligns shapes from the last dimension on.
    sizes = zip(mask.shape[::-1], x.shape[::-1], strict=False)
    fits = (
        x.dim() == 4
        and mask.is_floating_point()
        and mask.dim() <= 4
        and all(m in (1, n) for m, n in sizes)
    )
    if not fits:
        raise UsageError(
            f"softmax_dropout: the mask is {mask.dtype} {list(mask.shape)}, the scores are "
            f"{list(x.shape)}; an "
            "additive mask of floats that broadcasts to [batch, heads, queries, keys] is needed"
        )
