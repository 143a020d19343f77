"""What ``optimizer.params`` may hold for each name (torch-free)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_core.config import Section, option

Beta = Annotated[float, Field(ge=0, lt=1)]
Betas = tuple[Beta, Beta]
_FP32 = "Keep the states of 16-bit parameters in fp32; false: in the parameters' dtype."
_AMSGRAD = "AMSGrad; not offered, so only false."


class _OptimizerParams(Section):
    """What every optimizer takes."""

    lr: float = option(1e-3, "Learning rate.", ge=0)
    weight_decay: float = option(0.0, "Weight decay.", ge=0)


class _Moments(_OptimizerParams):
    betas: Betas = option((0.9, 0.999), "Decay rates of the first and second moment, per step.")
    eps: float = option(1e-8, "Added to the denominator.", ge=0)


class FusedAdamParams(_Moments):
    """``optimizer.params`` of FusedAdam."""

    bias_correction: bool = option(True, "Correct the moments for having begun at zero.")
    adam_w_mode: bool = option(True, "Decoupled weight decay (AdamW).")
    amsgrad: Literal[False] = option(False, _AMSGRAD)
    set_grad_none: bool = option(
        True, "The optimizer's own zero_grad drops gradients; false: fills them with zeros."
    )
    fp32_optimizer_states: bool = option(True, _FP32)


class AdamParams(_Moments):
    """``optimizer.params`` of Adam."""

    bias_correction: bool = option(True, "Correct the moments for having begun at zero.")
    adam_w_mode: bool = option(True, "Decoupled weight decay (AdamW).")
    amsgrad: bool = option(
        False, "Keep the maximum of the second moment; torch's Adam serves then."
    )
    torch_adam: bool = option(False, "Insist on torch's own Adam.")
    fp32_optimizer_states: bool = option(True, _FP32)


class AdamWParams(AdamParams):
    """``optimizer.params`` of AdamW."""

    adam_w_mode: Literal[True] = option(True, "AdamW is decoupled by definition.")


class CPUAdamParams(_Moments):
    """``optimizer.params`` of CPUAdam."""

    bias_correction: bool = option(True, "Correct the moments for having begun at zero.")
    adam_w_mode: bool = option(True, "Decoupled weight decay (AdamW).")
    amsgrad: Literal[False] = option(False, _AMSGRAD)
    fp32_optimizer_states: bool = option(True, _FP32)


class Adam8bitParams(_Moments):
    """``optimizer.params`` of Adam8bit."""

    bias_correction: bool = option(True, "Correct the moments for having begun at zero.")
    adam_w_mode: bool = option(True, "Decoupled weight decay (AdamW).")
    min_8bit_size: int = option(
        4096,
        "Elements of the smallest parameter whose moments have 8 bits; others' have fp32.",
        ge=0,
    )


class AdamW8bitParams(Adam8bitParams):
    """``optimizer.params`` of AdamW8bit."""

    adam_w_mode: Literal[True] = option(True, "AdamW is decoupled by definition.")


class DeepSpeedCPUAdamParams(_Moments):
    """``optimizer.params`` of DeepSpeedCPUAdam."""

    bias_correction: bool = option(True, "Correct the moments for having begun at zero.")
    adamw_mode: bool = option(True, "Decoupled weight decay (AdamW).")
    amsgrad: Literal[False] = option(False, _AMSGRAD)
    fp32_optimizer_states: bool = option(True, _FP32)


class CPUAdagradParams(_OptimizerParams):
    """``optimizer.params`` of CPUAdagrad and Adagrad."""

    lr: float = option(1e-2, "Learning rate.", ge=0)
    eps: float = option(1e-10, "Added to the denominator.", ge=0)
    lr_decay: float = option(0.0, "Update t, from 0, uses lr / (1 + t * lr_decay).", ge=0)
    initial_accumulator_value: float = option(0.0, "Where the sums of squares begin.", ge=0)
    fp32_optimizer_states: bool = option(True, _FP32)


class AdagradParams(CPUAdagradParams):
    """``optimizer.params`` of Adagrad."""


class DeepSpeedCPUAdagradParams(_OptimizerParams):
    """``optimizer.params`` of DeepSpeedCPUAdagrad."""

    lr: float = option(1e-2, "Learning rate.", ge=0)
    eps: float = option(1e-10, "Added to the denominator.", ge=0)
    amsgrad: Literal[False] = option(False, _AMSGRAD)
    fp32_optimizer_states: bool = option(True, _FP32)


class CPULionParams(_OptimizerParams):
    """``optimizer.params`` of DeepSpeedCPULion."""

    betas: Betas = option(
        (0.9, 0.999), "Weight of the momentum in the update, and its decay rate, per step."
    )
    fp32_optimizer_states: bool = option(True, _FP32)


class LionParams(CPULionParams):
    """``optimizer.params`` of Lion, FusedLion and CPULion."""

    set_grad_none: bool = option(
        True, "The optimizer's own zero_grad drops gradients; false: fills them with zeros."
    )


class LambParams(_Moments):
    """``optimizer.params`` of Lamb and FusedLamb."""

    bias_correction: bool = option(True, "Correct the step size for moments that begin at zero.")
    eps_inside_sqrt: bool = option(
        False, "Divide by the root of (v + eps) instead of the root of v, plus eps."
    )
    max_coeff: float = option(10.0, "Largest trust ratio.", ge=0)
    min_coeff: float = option(0.01, "Smallest trust ratio.", ge=0)
    amsgrad: Literal[False] = option(False, _AMSGRAD)


class AdamMiniParams(_Moments):
    """``optimizer.params`` of AdamMini."""


class ScheduleFreeAdamWParams(_Moments):
    """``optimizer.params`` of ScheduleFreeAdamW."""

    lr: float = option(2.5e-3, "Learning rate, which needs no decay.", ge=0)
    betas: Betas = option(
        (0.9, 0.999), "Where gradients are taken, between z (0) and the average (1); Adam's second."
    )
    warmup_steps: int = option(0, "Steps in which the learning rate rises.", ge=0)


class MuonParams(_OptimizerParams):
    """``optimizer.params`` of Muon."""

    momentum: float = option(0.95, "Decay rate of Muon's momentum, per step.", ge=0, lt=1)
    muon_lr: float | None = option(None, "Learning rate of hidden matrices; null: lr.", ge=0)
    adam_lr: float | None = option(None, "Learning rate of all other parameters; null: lr.", ge=0)
    betas: Betas = option((0.9, 0.95), "AdamW's decay rates, for all other parameters.")
    eps: float = option(1e-10, "AdamW's addition to the denominator.", ge=0)
    ns_method: Literal["gram", "standard", "polar_express"] = option(
        "gram",
        "How matrices are orthogonalised: gram and standard differ by rounding; polar_express leaves "
        "singular values nearer to 1.",
    )
    nesterov: bool = option(True, "Orthogonalise what is a step ahead of the momentum.")
    variant: Literal["muon", "normuon", "adamuon"] = option(
        "muon",
        "normuon, adamuon: divide what is orthogonalised by the root of a second moment, of each row "
        "or of each element.",
    )
    beta2: float = option(0.95, "Decay rate of the variants' second moment.", ge=0, lt=1)


class SOAPParams(_Moments):
    """``optimizer.params`` of SOAP."""

    lr: float = option(3e-3, "Learning rate.", ge=0)
    betas: Betas = option(
        (0.95, 0.95), "Decay rates of the moments; the second one's is the factors' too."
    )
    precondition_frequency: int = option(10, "Steps between two updates of the bases.", gt=0)
    max_precond_dim: int = option(10_000, "Sides of matrices that are longer are not turned.", gt=0)


class ShampooParams(_Moments):
    """``optimizer.params`` of Shampoo."""

    betas: Betas = option(
        (0.9, 0.999), "Decay rates of the mean of gradients, and of the factors and second moment."
    )
    damping: float = option(1e-12, "Added to the factors' eigenvalues.", gt=0)
    grafting: Literal["adam", "sgd", "none"] = option(
        "adam", "Whose size updates have: Adam's, that of the mean of gradients, or their own."
    )
    precondition_frequency: int = option(10, "Steps between two computations of the roots.", gt=0)
    max_precond_dim: int = option(10_000, "Sides of matrices that are longer have no factor.", gt=0)


class DionParams(_OptimizerParams):
    """``optimizer.params`` of Dion."""

    lr: float = option(0.01, "Learning rate.", ge=0)
    momentum: float = option(
        0.95, "Share of what was applied that stays in the momentum.", ge=0, lt=1
    )
    rank_fraction: float = option(
        0.25, "Rank of updates, as a share of a matrix's smaller side.", gt=0, le=1
    )
    betas: Betas = option((0.9, 0.95), "AdamW's decay rates, for all other parameters.")
    eps: float = option(1e-8, "Added to lengths of columns, and to AdamW's denominator.", ge=0)


class GaLoreParams(_Moments):
    """``optimizer.params`` of GaLore."""

    rank: int = option(128, "Rank of the projected gradients.", gt=0)
    update_proj_gap: int = option(200, "Steps between two computations of the projection.", gt=0)
    scale: float = option(0.25, "Factor of updates of matrices.", ge=0)


class MuAdamParams(_Moments):
    """``optimizer.params`` of MuAdam and MuAdamW; lr and weight_decay are those of the base
    model."""

    bias_correction: bool = option(True, "Correct the moments for having begun at zero.")
    amsgrad: Literal[False] = option(False, _AMSGRAD)
    fp32_optimizer_states: bool = option(True, _FP32)


class SGDParams(_OptimizerParams):
    """``optimizer.params`` of SGD."""

    momentum: float = option(0.0, "Decay rate of the momentum, per step; 0: none.", ge=0)
    dampening: float = option(0.0, "Share of each gradient that does not enter the momentum.")
    nesterov: bool = option(False, "Nesterov's look-ahead; needs momentum, and no dampening.")


class _OneBitParams(_Moments):
    """What the 1-bit family shares."""

    bias_correction: bool = option(
        True,
        "As in DeepSpeed.",
        without_effect="the 1-bit family corrects no bias, whatever this says",
    )
    eps_inside_sqrt: bool = option(
        False, "Divide by the root of (v + eps) instead of the root of v, plus eps."
    )
    amsgrad: Literal[False] = option(False, _AMSGRAD)
    cuda_aware: Literal[False] = option(False, "For MPI, which is not used, so only false.")
    comm_backend_name: Literal["nccl", "hccl", "compressed"] = option(
        "nccl",
        "DeepSpeed's transport.",
        without_effect="messages go over the run's own process groups",
    )


class OneBitAdamParams(_OneBitParams):
    """``optimizer.params`` of OneBitAdam."""

    freeze_step: int = option(100_000, "Steps of the warm-up, without compression.", ge=0)


class ZeroOneAdamParams(_OneBitParams):
    """``optimizer.params`` of ZeroOneAdam."""

    var_freeze_step: int = option(
        100_000, "Steps before the variance is frozen and local steps begin.", ge=0
    )
    var_update_scaler: int = option(
        16, "Updates of the variance after which the interval between them doubles.", gt=0
    )
    local_step_scaler: int = option(
        32_678, "Steps after which the interval of local steps doubles.", gt=0
    )
    local_step_clipper: int = option(16, "Most steps that a rank takes by itself.", gt=0)


class OneBitLambParams(OneBitAdamParams):
    """``optimizer.params`` of OneBitLamb."""

    max_coeff: float = option(10.0, "Largest trust ratio in the warm-up.", ge=0)
    min_coeff: float = option(0.01, "Smallest trust ratio in the warm-up.", ge=0)
    coeff_beta: float = option(
        0.9, "Decay rate of the trust ratios' running mean, per step.", ge=0, lt=1
    )
    factor_max: float = option(4.0, "Largest factor on the frozen trust ratio.", gt=0)
    factor_min: float = option(0.5, "Smallest factor on the frozen trust ratio.", gt=0)
    factor_threshold: float = option(
        0.1, "Most that the factor changes per step, as a share of it.", ge=0
    )
