"""The updates in plain torch over lists of tensors: what each optimizer means, and the path without kernels.

Scalars are exact (fp64). 16-bit tensors are widened to fp32 and rounded once. Where torch has a fused function for just
this update it is called, so that results are those of torch's own optimizer bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["adagrad", "adam", "lamb", "lion", "sgd"]

Tensors = Sequence[Tensor]
_FUSED_DEVICES = ("cpu", "cuda", "xpu", "mps")


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
) -> None:
    """Adam, or AdamW when `decoupled`. step: the number of this update, from 1."""
    if bias_correction and _alike(params, grads, exp_avgs, exp_avg_sqs):
        fused = torch._fused_adamw_ if decoupled else torch._fused_adam_
        steps = [torch.full((), float(step), dtype=torch.float32, device=params[0].device)] * len(params)
        fused(
            list(params), list(grads), list(exp_avgs), list(exp_avg_sqs), [], steps,
            lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
        )  # fmt: skip
        return
    correction1 = 1 - beta1**step if bias_correction else 1.0
    correction2 = 1 - beta2**step if bias_correction else 1.0

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        if decoupled:
            p.mul_(1 - lr * weight_decay)
        elif weight_decay:
            g = g.add(p, alpha=weight_decay)
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        p.addcdiv_(m, (v / correction2).sqrt_().add_(eps), value=-lr / correction1)

    _each(update, params, grads, exp_avgs, exp_avg_sqs)


def adagrad(params: Tensors, grads: Tensors, sums: Tensors, *, lr: float, eps: float, weight_decay: float) -> None:
    """Adagrad; `lr` after any decay of it."""
    if _alike(params, grads, sums):
        steps = [torch.ones((), dtype=torch.float32, device=params[0].device)] * len(params)
        torch._fused_adagrad_(
            list(params), list(grads), list(sums), steps,
            lr=lr, lr_decay=0.0, weight_decay=weight_decay, eps=eps, maximize=False,
        )  # fmt: skip
        return

    def update(p: Tensor, g: Tensor, total: Tensor) -> None:
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        total.addcmul_(g, g)
        p.addcdiv_(g, total.sqrt().add_(eps), value=-lr)

    _each(update, params, grads, sums)


def lion(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    weight_decay: float,
) -> None:
    """Lion: the sign of a momentum that looks ahead, with decoupled decay."""

    def update(p: Tensor, g: Tensor, m: Tensor) -> None:
        p.mul_(1 - lr * weight_decay).add_(m.lerp(g, 1 - beta1).sign_(), alpha=-lr)
        m.lerp_(g, 1 - beta2)

    _each(update, params, grads, exp_avgs)


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
) -> None:
    """SGD. momenta: None without momentum. first: momenta begin as the gradient, undampened."""
    if _alike(params, grads, momenta or ()):
        torch._fused_sgd_(
            list(params), list(grads), list(momenta or ()),
            weight_decay=weight_decay, momentum=momentum, lr=lr, dampening=dampening, nesterov=nesterov,
            maximize=False, is_first_step=first,
        )  # fmt: skip
        return

    def update(p: Tensor, g: Tensor, m: Tensor | None = None) -> None:
        if weight_decay:
            g = g.add(p, alpha=weight_decay)
        if m is not None:
            m.copy_(g) if first else m.mul_(momentum).add_(g, alpha=1 - dampening)
            g = g.add(m, alpha=momentum) if nesterov else m
        p.add_(g, alpha=-lr)

    _each(update, params, grads, *([momenta] if momenta is not None else []))


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
) -> list[float]:
    """LAMB; returns each tensor's trust ratio. Each tensor must be whole."""
    size = lr * (1 - beta2**step) ** 0.5 / (1 - beta1**step) if bias_correction else lr
    coeffs = []

    def update(p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        u = m / ((v + eps).sqrt_() if eps_inside_sqrt else v.sqrt().add_(eps))
        if weight_decay:
            u.add_(p, alpha=weight_decay)
        norms = torch.stack([p.norm(), u.norm()]).double().tolist()
        coeff = min(max(norms[0] / norms[1], min_coeff), max_coeff) if all(norms) else 1.0
        coeffs.append(coeff)
        p.add_(u, alpha=-size * coeff)

    _each(update, params, grads, exp_avgs, exp_avg_sqs)
    return coeffs


def _alike(params: Tensors, *others: Tensors) -> bool:
    """Whether torch's fused functions serve: one dtype, and memory in one order, of which they go by."""
    first = params[0]
    return first.device.type in _FUSED_DEVICES and all(
        t.dtype == p.dtype and t.stride() == p.stride() and _dense(p)
        for tensors in others
        for p, t in zip(params, tensors, strict=bool(tensors))
    )


def _dense(tensor: Tensor) -> bool:
    return tensor.is_contiguous() or (
        sum((s - 1) * t for s, t in zip(tensor.shape, tensor.stride(), strict=True)) + 1 == tensor.numel()
    )


def _each(update: Callable[..., None], *lists: Tensors) -> None:
    """`update` for the tensors at each place, 16-bit ones as fp32 copies; all but gradients (the second) are kept."""
    for row in zip(*lists, strict=True):
        wide = torch.float64 if any(t.dtype == torch.float64 for t in row) else torch.float32
        copies = [t.to(wide) for t in row]
        update(*copies)
        for place, (tensor, copy) in enumerate(zip(row, copies, strict=True)):
            if place != 1 and copy is not tensor:
                tensor.copy_(copy)
