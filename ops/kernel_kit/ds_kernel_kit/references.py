"""What each kernel means: the core's pure-torch references, and the path where nothing faster is
installed.

All take lists of tensors and update them in place. Scalars are exact (fp64); 16-bit tensors are
widened to fp32, worked on there and rounded once. On devices where torch has a fused function for
just this update it is called, so that results are those of torch's own optimizer bit for bit.

[Note: position] What becomes of an element must not depend on where it stands: ranks cut the same
parameter at other places, and copies of a tied one must stay equal bit for bit. torch's fused
functions of the CPU round the last few elements of a tensor otherwise than those before them (they
are no multiple of a vector), so they are not used.

Every optimizer step takes two options more than its mathematics: `scale` multiplies the gradients
as they are read (unscaling and clipping in one number; gradients themselves are not changed), and
`copies` get the new parameters, cast (the 16-bit weights of mixed precision). Parameters,
gradients, states and copies of one place have one shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Quantized = tuple[Tensor, Tensor, Tensor | None]
# See [Note: position].
_FUSED_DEVICES = ("cuda", "xpu", "mps")


def adam(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    decoupled: bool = True,
    bias_correction: bool = True,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """Adam, or AdamW when `decoupled`. step: the number of this update, from 1."""
    if not params:
        return
    alike = bias_correction and _alike(params, exp_avgs, exp_avg_sqs)
    if alike and (given := _fit_gradients(params, grads, scale)):
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        # torch's function takes the step as a tensor for each parameter.
        count = torch.full((), float(step), dtype=torch.float32, device=params[0].device)
        fused(
            list(params),
            given,
            list(exp_avgs),
            list(exp_avg_sqs),
            [],
            [count] * len(params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        _cast_out(params, copies)
        return
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        # In torch's order of operations, so that the bits are those of its optimizers.
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g = g.add(p, alpha=weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        divisor = (v.sqrt() / correction2**0.5).add_(eps)
        p.addcdiv_(m, divisor, value=-lr / correction1)

    _each(update, scale, copies, params, grads, exp_avgs, exp_avg_sqs)


def adagrad(
    params: Tensors,
    grads: Tensors,
    sums: Tensors,
    *,
    lr: float,
    eps: float,
    weight_decay: float,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """Adagrad; `lr` after any decay of it."""
    if not params:
        return
    if _alike(params, sums) and (given := _fit_gradients(params, grads, scale)):
        steps = [torch.ones((), dtype=torch.float32, device=params[0].device)] * len(params)
        torch._fused_adagrad_(
            list(params),
            given,
            list(sums),
            steps,
            lr=lr,
            lr_decay=0.0,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )
        _cast_out(params, copies)
        return

    def update(p: Tensor, g: Tensor, total: Tensor) -> None:
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        total.addcmul_(g, g)
        p.addcdiv_(g, total.sqrt().add_(eps), value=-lr)

    _each(update, scale, copies, params, grads, sums)


def lion(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """Lion: the sign of a momentum that looks ahead, with decoupled decay."""

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.mul_(1 - lr * weight_decay).add_(m.lerp(g, 1 - beta1).sign_(), alpha=-lr)
        m.lerp_(g, 1 - beta2)

    _each(update, scale, copies, params, grads, exp_avgs)


def sgd(
    params: Tensors,
    grads: Tensors,
    momenta: Tensors | None,
    *,
    lr: float,
    momentum: float,
    dampening: float,
    weight_decay: float,
    nesterov: bool,
    first: bool,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> None:
    """SGD.

    momenta: None without momentum.
    first: momenta begin as the gradient, undampened.
    """
    if not params:
        return
    # torch 2.13 leaves most elements of 16-bit parameters as they were in a first step on the CPU.
    half = any(p.dtype in (torch.float16, torch.bfloat16) for p in params)
    if (
        not half
        and _alike(params, momenta or ())
        and (given := _fit_gradients(params, grads, scale))
    ):
        torch._fused_sgd_(
            list(params),
            given,
            list(momenta or ()),
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
            is_first_step=first,
        )
        _cast_out(params, copies)
        return

    def update(p: Tensor, g: Tensor, m: Tensor | None = None) -> None:
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        if m is not None:
            m.copy_(g) if first else m.mul_(momentum).add_(g, alpha=1 - dampening)
            g = g.add(m, alpha=momentum) if nesterov else m
        p.add_(g, alpha=-lr)

    _each(update, scale, copies, params, grads, *([momenta] if momenta is not None else []))


def lamb(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    *,
    step: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    eps_inside_sqrt: bool,
    min_coeff: float,
    max_coeff: float,
    scale: float = 1.0,
    copies: Tensors | None = None,
) -> list[float]:
    """LAMB; returns each tensor's trust ratio. Each tensor must be whole.

    The update is worked out from the moments as they are stored, so a kernel may do so in a second
    pass.
    """
    size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr
    kinds = [t.dtype for t in exp_avgs]
    coeffs: list[float] = []

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        kind = kinds[len(coeffs)]
        # As stored: rounded to the state's dtype and back, since a kernel reads it again in its
        # second pass.
        first = m.to(kind).to(m.dtype)
        second = v.to(kind).to(v.dtype)
        u = first / ((second + eps).sqrt_() if eps_inside_sqrt else second.sqrt().add_(eps))
        if weight_decay:
            u.add_(p, alpha=weight_decay)
        norms = [float(torch.linalg.vector_norm(t, dtype=torch.float64)) for t in (p, u)]
        # You et al. 2020: the trust ratio; 1 where either norm is 0.
        coeff = min(max(norms[0] / norms[1], min_coeff), max_coeff) if all(norms) else 1.0
        coeffs.append(coeff)
        p.add_(u, alpha=-size * coeff)

    _each(update, scale, copies, params, grads, exp_avgs, exp_avg_sqs)
    return coeffs


def accumulate(into: Tensors, added: Tensors, *, scale: float = 1.0) -> None:
    """``into[i] += scale * added[i]``; `into` is fp32, `added` of one dtype."""
    for total, more in zip(into, added, strict=True):
        total.add_(more, alpha=scale)


def quantize(
    x: Tensor, *, bits: int, group: int, symmetric: bool, out: Quantized | None = None
) -> Quantized:
    """The elements of `x` in whole numbers, `group` of them (in order; the last group may be
    shorter) to a scale.

    Returns q, scales and lows (fp32, one per group; lows None when symmetric).

    symmetric: q in ±(2^(bits-1) - 1) and x ≈ q * scale; else q in 0 .. 2^bits - 1 and x ≈ q * scale
        + low. bits 8: q has one element for each of x, int8 or uint8. bits 4: uint8, two to a byte,
        the first in the low half; `group` must be even. A group that is all one value (symmetric:
        all zero), or whose range is not finite, is all zeros; what is not finite shows in its
        scale.
    out: contiguous tensors that are filled and returned.
    """
    check_quantize(bits, group)
    if out is not None:
        made = quantize(x, bits=bits, group=group, symmetric=symmetric)
        for place, part in zip(out, made, strict=True):
            if place is not None and part is not None:
                place.copy_(part)
        return out
    flat = x.detach().reshape(-1).float()
    n = flat.numel()
    groups = (n + group - 1) // group
    rows = torch.nn.functional.pad(flat, (0, groups * group - n)).view(groups, group)
    there = torch.arange(groups * group, device=x.device).view(groups, group) < n
    if groups == 0:
        low = high = flat.new_zeros(0)
    else:  # amin and amax carry NaN
        # The last group may be shorter: what pads it counts for neither end.
        low = torch.where(there, rows, rows.new_tensor(torch.inf)).amin(1)
        high = torch.where(there, rows, rows.new_tensor(-torch.inf)).amax(1)
    most = 2 ** (bits - 1) - 1 if symmetric else 2**bits - 1
    least = -most if symmetric else 0
    scales = (torch.maximum(-low, high) if symmetric else high - low) / most
    bases = torch.zeros_like(low) if symmetric else low
    # No step: a group of one value, or one that is not finite.
    steps = (scales > 0) & torch.isfinite(scales)
    whole = torch.round((rows - bases[:, None]) / scales[:, None]).clamp_(least, most)
    q = torch.where(steps[:, None] & there, whole, 0.0).to(torch.int16).view(-1)
    lows = None if symmetric else low
    if bits == 8:
        return q[:n].to(torch.int8 if symmetric else torch.uint8), scales, lows
    # Two's complement in 4 bits; the first number in the low half.
    pairs = (q & 15).view(-1, 2)
    return (pairs[:, 0] | pairs[:, 1] << 4)[: (n + 1) // 2].to(torch.uint8), scales, lows


def dequantize(
    q: Tensor,
    scales: Tensor,
    lows: Tensor | None,
    *,
    bits: int,
    group: int,
    numel: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """What `quantize` was given, but for rounding: a flat tensor of `numel` elements.

    lows: None when symmetric.

    out: a contiguous tensor of `dtype` that is filled and returned.
    """
    check_quantize(bits, group)
    if out is not None:
        return out.view(-1).copy_(
            dequantize(q, scales, lows, bits=bits, group=group, numel=numel, dtype=dtype)
        )
    if bits == 4:
        q = torch.stack([q & 15, q >> 4], 1).view(-1)[:numel]
        q = (q.to(torch.int16) ^ 8) - 8 if lows is None else q
    which = torch.arange(numel, device=q.device) // group
    x = q.float() * scales[which]
    return (x if lows is None else x + lows[which]).to(dtype)


def dequantize_sum(
    q: Tensor,
    scales: Tensor,
    *,
    bits: int,
    group: int,
    numel: int,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """The sum of what rows of symmetrically quantised values stand for, in order, in fp32, and
    rounded once.

    q, scales: each row what `quantize` gives of `numel` elements; rows are contiguous.
    out: as for `dequantize`.
    """
    check_quantize(bits, group)
    total = torch.zeros(numel, device=q.device)
    for row, steps in zip(q, scales, strict=True):
        total += dequantize(
            row, steps, None, bits=bits, group=group, numel=numel, dtype=torch.float32
        )
    return total.to(dtype) if out is None else out.view(-1).copy_(total)


def requantize_sum(
    q: Tensor, scales: Tensor, *, bits: int, group: int, numel: int, out: Quantized | None = None
) -> Quantized:
    """`quantize`, in the same way, of the `dequantize_sum` in fp32."""
    total = dequantize_sum(q, scales, bits=bits, group=group, numel=numel, dtype=torch.float32)
    return quantize(total, bits=bits, group=group, symmetric=True, out=out)


def check_quantize(bits: int, group: int) -> None:
    """ValueError for sizes that `quantize` does not have."""
    if bits not in (4, 8):
        raise ValueError(f"bits {bits}: use 4 or 8")
    if group < 1 or (bits == 4 and group % 2):
        raise ValueError(f"group {group}: at least 1 is needed, and an even number for 4 bits")


def _alike(params: Tensors, *others: Tensors) -> bool:
    """Whether torch's fused functions serve: one dtype, and memory in one order, of which they go
    by.
    """
    first = params[0]
    return first.device.type in _FUSED_DEVICES and all(
        t.dtype == p.dtype and t.stride() == p.stride() and is_dense(p)
        for tensors in others
        for p, t in zip(params, tensors, strict=bool(tensors))
    )


def _fit_gradients(params: Tensors, grads: Tensors, scale: float) -> list[Tensor] | None:
    """Gradients times `scale` as torch's fused functions take them: in the parameters' dtype, at
    their strides.

    None where they are not, or where 16 bits would round the product.
    """
    if not all(
        g.stride() == p.stride() and is_dense(p) for p, g in zip(params, grads, strict=True)
    ):
        return None
    given = list(grads)
    if all(g.dtype == p.dtype for p, g in zip(params, grads, strict=True)):
        if scale == 1:
            return given
        return list(torch._foreach_mul(given, scale)) if _wide(params) else None
    if not _wide(params):
        return None
    # A copy even where dtypes are equal: the gradients themselves must not change.
    given = [g.to(p.dtype, copy=True) for p, g in zip(params, grads, strict=True)]
    if scale != 1:
        torch._foreach_mul_(given, scale)
    return given


def _wide(params: Tensors) -> bool:
    return all(p.dtype in (torch.float32, torch.float64) for p in params)


def is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True
    expected = 1
    # From the innermost dimension outwards, each stride is the number of elements inside.
    for stride, size in sorted(
        (stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    ):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _each(
    update: Callable[..., None], scale: float, copies: Tensors | None, *lists: Tensors
) -> None:
    """`update` for the tensors at each place, 16-bit ones as fp32 copies; all but gradients (the
    second) are kept.
    """
    for row in zip(*lists, strict=True):
        wide = torch.float64 if any(t.dtype == torch.float64 for t in row) else torch.float32
        widened = [t.to(wide) for t in row]
        if scale != 1:
            widened[1] = widened[1] * scale
        update(*widened)
        for place, (tensor, copy) in enumerate(zip(row, widened, strict=True)):
            if place != 1 and copy is not tensor:
                tensor.copy_(copy)
    _cast_out(lists[0], copies)


def _cast_out(params: Tensors, copies: Tensors | None) -> None:
    if copies is not None:
        for param, copy in zip(params, copies, strict=True):
            copy.copy_(param)
