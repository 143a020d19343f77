"""Lion under its documented names."""

from __future__ import annotations

from typing import Any, ClassVar

from ds_optimizers.base import KernelOptimizer, StepBatch, check_common, require_cpu


class Lion(KernelOptimizer):
    """Lion (Chen et al. 2023): p -= lr * (sign(β1 m + (1-β1) g) + wd * p); m = β2 m + (1-β2) g.

    State ``exp_avg``.
    """

    op: ClassVar[str] = "lion"
    in_portions: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    states: ClassVar[tuple[str, ...]] = ("exp_avg",)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_common(lr=lr, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay}
        super().__init__(params, defaults, fp32_states=fp32_optimizer_states)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """torch's, with the default that `set_grad_none` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        beta1, beta2 = group["betas"]
        run = self.kernel(batch.params[0])
        options = {
            "lr": group["lr"],
            "beta1": beta1,
            "beta2": beta2,
            "weight_decay": group["weight_decay"],
        }
        run(
            batch.params,
            batch.grads,
            *batch.states,
            **options,
            scale=batch.scale,
            copies=batch.copies,
        )


class FusedLion(Lion):
    """The same."""


class CPULion(Lion):
    """The same; a name that says where it mostly works."""


class DeepSpeedCPULion(Lion):
    """The same for parameters on the CPU (UsageError elsewhere)."""

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        weight_decay: float = 0.0,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params, lr, betas, weight_decay, fp32_optimizer_states=fp32_optimizer_states
        )
        require_cpu(self)
