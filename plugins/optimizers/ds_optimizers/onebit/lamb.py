"""1-bit LAMB: LAMB until `freeze_step`, then compressed momenta, and trust ratios that follow the
variance.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ds_optimizers.onebit.base import OneBit, Work, check_arguments, denominator, log


class OneBitLamb(OneBit):
    """1-bit LAMB (Li et al. 2021), without bias correction.

    After the warm-up the running mean of trust ratios stays as it is, and is multiplied by a factor
    that follows from how the variance has changed. Groups may have ``exp_avg_mask``.

    freeze_step: updates of the warm-up, which is LAMB with gradients averaged in full.
    min_coeff, max_coeff: bounds of trust ratios in the warm-up.
    coeff_beta: decay of their running mean.
    factor_min, factor_max: bounds of the factor.
    factor_threshold: the share by which the factor changes per step, at most.

    The other arguments are those of `OneBitAdam`.
    """

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
    ) -> None:
        check_arguments(
            amsgrad=amsgrad,
            max_grad_norm=max_grad_norm,
            deepspeed=deepspeed,
            cuda_aware=cuda_aware,
            comm_backend_name=comm_backend_name,
        )
        self.freeze_step = freeze_step
        self.coeff_beta = coeff_beta
        self.factor_max = factor_max
        self.factor_min = factor_min
        self.factor_threshold = factor_threshold
        # The largest count of a parameter, which is the optimizer's; None: to be read from the
        # states.
        self._steps: int | None = None
        self._coeffs: dict[Tensor, float] = {}
        keys = {"lr": lr, "betas": tuple(betas), "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(
            params,
            {**keys, "weight_decay": weight_decay, "max_coeff": max_coeff, "min_coeff": min_coeff},
        )

    @property
    def takes_averages(self) -> bool:
        """See `OneBit.takes_averages`: in the warm-up."""
        if self._steps is None:
            self._steps = max(
                (int(s["step"]) for s in self.state.values() if "step" in s), default=0
            )
        return self._steps < self.freeze_step

    def loaded(self) -> None:
        """See `OneBit.loaded`."""
        super().loaded()
        self._steps = None

    def get_lamb_coeffs(self) -> list[float]:
        """The trust ratio of each parameter at its last update, in the order of parameters."""
        return [
            self._coeffs[p] for g in self.param_groups for p in g["params"] if p in self._coeffs
        ]

    def update(self) -> None:
        """See `OneBit.update`."""
        warm = self.takes_averages
        rows = [(group, pair) for group, pairs in self.work() for pair in pairs]
        if warm:
            for group, (param, grad) in rows:
                self._warm(param, grad, group)
        else:
            if rows and "scaling_coeff" not in self.state[rows[0][1][0]]:
                self._measure([p for _, (p, _) in rows])
            self._compressed(rows)
        self._steps = None
        if warm and not self.takes_averages:
            log.info(
                "OneBitLamb: step %d ends the warm-up; from now on ranks exchange sign bits",
                self.freeze_step,
            )

    def _warm(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> None:
        state = self.begin_state(param)
        if "lamb_coeff_freeze" not in state:
            state["lamb_coeff_freeze"] = torch.zeros((), dtype=torch.float64)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update = state["exp_avg"] / denominator(state["exp_avg_sq"], group)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        # LAMB: the update is scaled to the size of the weight. Both norms in one read from the
        # device.
        norms = torch.stack([param.norm(), update.norm()]).double().tolist()
        coeff = (
            min(max(norms[0] / norms[1], group["min_coeff"]), group["max_coeff"])
            if all(norms)
            else 1.0
        )
        # A ratio of 1 means a norm of 0, or a tensor that is not adapted: not part of the mean.
        if coeff != 1.0:
            state["lamb_coeff_freeze"].mul_(self.coeff_beta).add_((1 - self.coeff_beta) * coeff)
        self._coeffs[param] = coeff
        param.add_(update, alpha=-group["lr"] * coeff)
        # The variance that goes on changing, by which the ratio is corrected later.
        if int(state["step"]) == self.freeze_step:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _measure(self, params: list[Tensor]) -> None:
        """At the end of the warm-up: a factor per tensor that makes all momenta alike in size, since
        they will share one scale.
        """
        sizes = []
        for param in params:
            momentum = self.state[param]["exp_avg"]
            sizes.append(float(momentum.norm()) / max(momentum.numel(), 1) ** 0.5)
        mean = sum(sizes) / max(len(sizes), 1)
        for param, size in zip(params, sizes, strict=True):
            state = self.state[param]
            state["scaling_coeff"] = torch.tensor(
                mean / size if size and mean else 1.0, dtype=torch.float64
            )
            state["last_factor"] = torch.ones((), dtype=torch.float64)
            # A parameter that missed steps had not counted to freeze_step itself.
            if "exp_avg_sq_fresh" not in state:
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _compressed(self, rows: list[tuple[dict[str, Any], tuple[Tensor, Tensor]]]) -> None:
        # 1. Momenta of this rank's gradients, scaled to one size; 2. their compressed average.
        before: list[Tensor] = []
        momenta: Work = []
        for group, (param, grad) in rows:
            state = self.state[param]
            beta1 = group["betas"][0]
            state["step"] += 1
            before.append(state["exp_avg"].clone())
            state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1).mul_(
                state["scaling_coeff"].item()
            )
            momenta.append((param, state["exp_avg"]))
        self.compress_fused(momenta)
        for param, momentum in momenta:
            momentum.div_(self.state[param]["scaling_coeff"].item())
        self.mask(momenta)
        for (group, (param, _)), last in zip(rows, before, strict=True):
            self._apply(param, last, group)

    def _apply(self, param: Tensor, last: Tensor, group: Mapping[str, Any]) -> None:
        state = self.state[param]
        beta1, beta2 = group["betas"]
        # The average gradient, from the change of the averaged momentum: m' = β1 m + (1 - β1) g.
        seen = (state["exp_avg"] - beta1 * last).div_(1 - beta1)
        state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
        divisor = denominator(state["exp_avg_sq"], group)
        update = state["exp_avg"] / divisor
        # Where the variance has shrunk since, LAMB would step further: the largest ratio is the
        # factor.
        ratios = divisor / denominator(state["exp_avg_sq_fresh"], group)
        factor = float(ratios.max()) if ratios.numel() else 1.0
        if group["weight_decay"]:
            # Weight decay is no part of the adapted update: the factor counts by the share of the
            # rest.
            plain = float(update.norm())
            update.add_(param, alpha=group["weight_decay"])
            whole = float(update.norm())
            share = min(1.0, plain / whole) if whole else 1.0
            factor = factor * share + 1.0 - share
        factor = min(max(factor, self.factor_min), self.factor_max)
        # No jumps: the compressed gradient is noisy.
        previous = state["last_factor"].item()
        factor = min(
            max(factor, previous * (1 - self.factor_threshold)),
            previous * (1 + self.factor_threshold),
        )
        state["last_factor"].fill_(factor)
        # A ratio that was 1 in the whole warm-up was never averaged.
        coeff = (state["lamb_coeff_freeze"].item() or 1.0) * factor
        self._coeffs[param] = coeff
        param.add_(update, alpha=-group["lr"] * coeff)
