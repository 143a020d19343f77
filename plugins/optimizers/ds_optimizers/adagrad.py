"""Adagrad under its documented names."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_optimizers.base import KernelOptimizer, StepBatch, check_common, require_cpu


class Adagrad(KernelOptimizer):
    """Adagrad (Duchi et al. 2011) with torch's parameters; state ``sum``.

    lr_decay: update t (from 0) uses lr / (1 + t * lr_decay).
    initial_accumulator_value: where sums of squares begin.
    fp32_optimizer_states: sums of 16-bit parameters in fp32.
    """

    op: ClassVar[str] = "adagrad"
    in_portions: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    states: ClassVar[tuple[str, ...]] = ("sum",)
    counts: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        fp32_optimizer_states: bool = True,
    ) -> None:
        check_common(lr=lr, eps=eps, weight_decay=weight_decay)
        if lr_decay < 0 or initial_accumulator_value < 0:
            raise ValueError(
                f"lr_decay {lr_decay} and initial_accumulator_value must not be negative"
            )
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps}
        start = {"initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, {**defaults, **start}, fp32_states=fp32_optimizer_states)

    def begin(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """See `KernelOptimizer.begin`."""
        value = group["initial_accumulator_value"]
        # A complex parameter is updated as two real ones, so both parts begin there.
        start = complex(value, value) if param.is_complex() else value
        return {n: torch.full_like(t, start) for n, t in super().begin(param, group).items()}

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        run = self.kernel(batch.params[0])
        lr = group["lr"] / (1 + (batch.step - 1) * group["lr_decay"])
        options = {"lr": lr, "eps": group["eps"], "weight_decay": group["weight_decay"]}
        run(
            batch.params,
            batch.grads,
            *batch.states,
            **options,
            scale=batch.scale,
            copies=batch.copies,
        )


class CPUAdagrad(Adagrad):
    """The same; a name that says where it mostly works."""


class DeepSpeedCPUAdagrad(Adagrad):
    """The same for parameters on the CPU (UsageError elsewhere).

    amsgrad: not offered.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError("DeepSpeedCPUAdagrad has no AMSGrad variant; leave amsgrad out")
        super().__init__(
            model_params,
            lr,
            weight_decay=weight_decay,
            eps=eps,
            fp32_optimizer_states=fp32_optimizer_states,
        )
        require_cpu(self)
