"""LAMB (You et al. 2020, algorithm 2) under its documented names.

Its trust ratios are norms of full tensors. A tensor that this rank has all of is updated by the
kernel. Of one that is cut, each rank works out its part of the update and both sums of squares;
these are added over the ranks, for all such tensors at once, and then each rank applies its part.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_optimizers.base import KernelOptimizer, StepBatch, check_common
from ds_optimizers.collecting import CollectingOptimizer, wide


@dataclass(frozen=True, slots=True)
class _Noted:
    """A part of a tensor whose update waits for the norms of all of it."""

    group: dict[str, Any]
    param: Tensor
    update: Tensor
    size: float
    copy: Tensor | None


class FusedLamb(CollectingOptimizer):
    """LAMB: u = m / (√v + eps) + wd * p; p -= step * c * u, c = ‖p‖ / ‖u‖ in [min_coeff,
    max_coeff], 1 if a norm is 0.

    bias_correction: step = lr * √(1-β2^t) / (1-β1^t), else lr.
    eps_inside_sqrt: m / √(v + eps).
    max_grad_norm: 0 only; clipping is the engine's.
    amsgrad: not offered (RuntimeError).
    """

    op: ClassVar[str] = "lamb"
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    kept: ClassVar[tuple[str, ...]] = (*KernelOptimizer.kept, "_coeffs", "_noted")

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
    ) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} has no AMSGrad variant; leave amsgrad out")
        if max_grad_norm:
            raise ValueError(
                f"max_grad_norm {max_grad_norm}: clipping is the engine's; set gradient_clipping"
            )
        if not 0 <= min_coeff <= max_coeff:
            raise ValueError(
                f"min_coeff {min_coeff} and max_coeff {max_coeff}: 0 <= min_coeff <= max_coeff is "
                "needed"
            )
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        # The trust ratio of each parameter at its last update, for `get_lamb_coeffs`.
        self._coeffs: dict[Tensor, float] = {}
        # What `collect` completes in this step.
        self._noted: list[_Noted] = []
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        modes = {"bias_correction": bias_correction, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(
            params, {**defaults, **modes, "max_coeff": max_coeff, "min_coeff": min_coeff}
        )

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratio of each parameter that this rank updated, in the order of parameters."""
        return [
            self._coeffs[p] for g in self.param_groups for p in g["params"] if p in self._coeffs
        ]

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        cut = [i for i, owner in enumerate(batch.owners) if self._is_cut(owner)]
        for i in cut:
            copy = None if batch.copies is None else batch.copies[i]
            self._note(group, batch, i, copy)
        if len(cut) < len(batch.owners):
            self._update_full(group, batch.without(cut) if cut else batch)

    def _is_cut(self, param: Tensor) -> bool:
        """Whether other ranks have parts of the parameter that this rank lacks."""
        return self.layout is not None and not self.layout.parts[param].mine.whole

    def _update_full(self, group: dict[str, Any], batch: StepBatch) -> None:
        beta1, beta2 = group["betas"]
        run = self.kernel(batch.params[0])
        same = (
            "lr",
            "eps",
            "weight_decay",
            "bias_correction",
            "eps_inside_sqrt",
            "min_coeff",
            "max_coeff",
        )
        coeffs = run(
            batch.params,
            batch.grads,
            *batch.states,
            step=batch.step,
            beta1=beta1,
            beta2=beta2,
            **{k: group[k] for k in same},
            scale=batch.scale,
            copies=batch.copies,
        )
        self._coeffs.update(zip(batch.owners, coeffs, strict=True))

    def _note(self, group: dict[str, Any], batch: StepBatch, i: int, copy: Tensor | None) -> None:
        """Update the moments of one part, and work out its update without the trust ratio.

        The same arithmetic as `ds_kernel_kit.references.lamb`.
        """
        beta1, beta2 = group["betas"]
        grad = wide(batch.grads[i]).to(wide(batch.params[i]).dtype) * batch.scale
        moments = [states[i] for states in batch.states]
        first, second = (wide(m).to(grad.dtype) for m in moments)
        first.lerp_(grad, 1 - beta1)
        second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        for moment, value in zip(moments, (first, second), strict=True):
            if moment is not value:
                moment.copy_(value)
        # From the moments as they are stored, as the kernel does.
        first, second = (wide(m).to(grad.dtype) for m in moments)
        eps = group["eps"]
        inside = group["eps_inside_sqrt"]
        update = first / ((second + eps).sqrt_() if inside else second.sqrt().add_(eps))
        if group["weight_decay"]:
            update.add_(wide(batch.params[i]), alpha=group["weight_decay"])
        size = group["lr"]
        if group["bias_correction"]:
            size *= math.sqrt(1 - beta2**batch.step) / (1 - beta1**batch.step)
        self._noted.append(_Noted(group, batch.owners[i], update, size, copy))

    def collect(self) -> None:
        """See `CollectingOptimizer.collect`: the trust ratios of tensors that are cut."""
        if self.layout is None:
            return
        noted = self._noted
        self._noted = []
        squares = {n.param: _squares(_real(n.param), n.update) for n in noted}
        sums = self.layout.sums(squares, length=lambda part: 2)
        # One copy from the device for all.
        norms = torch.stack([sums[n.param] for n in noted]).sqrt().tolist() if noted else []
        for each, (weight, change) in zip(noted, norms, strict=True):
            low = each.group["min_coeff"]
            high = each.group["max_coeff"]
            coeff = min(max(weight / change, low), high) if weight and change else 1.0
            self._coeffs[each.param] = coeff
            param = _real(each.param)
            if param.dtype == each.update.dtype:
                param.add_(each.update, alpha=-each.size * coeff)
            else:
                param.copy_(wide(param).add(each.update, alpha=-each.size * coeff))
            if each.copy is not None:
                each.copy.copy_(param)


def _real(param: Tensor) -> Tensor:
    """As `StepBatch.params`."""
    return torch.view_as_real(param) if param.is_complex() else param


def _squares(*tensors: Tensor) -> Tensor:
    """The sum of squares of each, in fp64."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(norms).square()


class Lamb(FusedLamb):
    """The same; the config's `Lamb`."""
