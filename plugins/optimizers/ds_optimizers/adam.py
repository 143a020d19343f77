"""Adam and AdamW under their documented names: one update, on the best kernel for the device.

Kingma and Ba 2015, algorithm 1; Loshchilov and Hutter 2019, algorithm 2.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch.optim import Optimizer

from ds_optimizers.base import KernelOptimizer, StepBatch, check_common, require_cpu


class FusedAdam(KernelOptimizer):
    """Adam, decoupled (AdamW) unless `adam_w_mode` is false.

    bias_correction: whether the moments are corrected.
    amsgrad: not offered (RuntimeError).
    set_grad_none: whether `zero_grad` drops gradients by default, or fills them with zeros.
    fp32_optimizer_states: moments of 16-bit parameters in fp32.
    """

    op: ClassVar[str] = "adam"
    in_portions: ClassVar[bool] = True
    scales: ClassVar[bool] = True
    states: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        if amsgrad:
            raise RuntimeError(
                f"{type(self).__name__} has no AMSGrad variant; use torch_adam, or "
                "torch.optim.AdamW"
            )
        check_common(lr=lr, eps=eps, betas=betas, weight_decay=weight_decay)
        self.set_grad_none = set_grad_none
        defaults = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        modes = {"bias_correction": bias_correction, "adam_w_mode": adam_w_mode}
        super().__init__(params, {**defaults, **modes}, fp32_states=fp32_optimizer_states)

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """torch's, with the default that `set_grad_none` says."""
        super().zero_grad(self.set_grad_none if set_to_none is None else set_to_none)

    def update(self, group: dict[str, Any], batch: StepBatch) -> None:
        """See `KernelOptimizer.update`."""
        beta1, beta2 = group["betas"]
        run = self.kernel(batch.params[0])
        run(
            batch.params,
            batch.grads,
            *batch.states,
            step=batch.step,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            eps=group["eps"],
            weight_decay=group["weight_decay"],
            decoupled=group["adam_w_mode"],
            bias_correction=group["bias_correction"],
            scale=batch.scale,
            copies=batch.copies,
        )


class Adam(FusedAdam):
    """The same; the config's `Adam`."""


class AdamW(FusedAdam):
    """The same, always decoupled."""


class DeepSpeedCPUAdam(FusedAdam):
    """The same for parameters on the CPU (UsageError elsewhere); the argument is spelt `adamw_mode`
    here.
    """

    def __init__(
        self,
        model_params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> None:
        super().__init__(
            model_params,
            lr,
            bias_correction,
            betas,
            eps,
            adamw_mode,
            weight_decay,
            amsgrad,
            fp32_optimizer_states=fp32_optimizer_states,
        )
        require_cpu(self)


class CPUAdam(FusedAdam):
    """The same; a name that says where it mostly works."""


def make_adam(
    groups: Any, *, torch_adam: bool = False, amsgrad: bool = False, **params: Any
) -> Optimizer:
    """`Adam`; torch's own when the config insists on it, or wants AMSGrad."""
    return _choose(Adam, groups, torch_adam, amsgrad, params)


def make_adamw(
    groups: Any, *, torch_adam: bool = False, amsgrad: bool = False, **params: Any
) -> Optimizer:
    """`AdamW`, with the same exceptions."""
    return _choose(AdamW, groups, torch_adam, amsgrad, params)


def _choose(
    cls: type[FusedAdam], groups: Any, torch_adam: bool, amsgrad: bool, params: dict[str, Any]
) -> Optimizer:
    if not (torch_adam or amsgrad):
        return cls(groups, **params)
    from ds_core.setup.optim import make_adam as make_torch

    if not params.pop("bias_correction", True):
        raise ValueError(
            "bias_correction false: torch's Adam always corrects; leave torch_adam and amsgrad out"
        )
    if not params.pop("fp32_optimizer_states", True):
        raise ValueError(
            "fp32_optimizer_states: torch's moments have the parameters' dtype; leave it out"
        )
    return make_torch(groups, amsgrad=amsgrad, **params)
