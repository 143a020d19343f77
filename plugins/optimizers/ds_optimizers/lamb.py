"""LAMB (You et al. 2020, algorithm 2) under its documented names.

Its trust ratios are norms of whole tensors, so a partitioner must not cut them.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from ds_optimizers.base import KernelOptimizer, StepBatch, check_common


class FusedLamb(KernelOptimizer):
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
    kept: ClassVar[tuple[str, ...]] = (*KernelOptimizer.kept, "_coeffs")

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


class Lamb(FusedLamb):
    """The same; the config's `Lamb`."""
