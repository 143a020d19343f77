"""0/1 Adam: variances are updated ever more rarely, then local steps averaged ever more rarely."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_optimizers.onebit.base import OneBit, Work, check_arguments, denominator, log


class ZeroOneAdam(OneBit):
    """0/1 Adam (Lu et al. 2022), without bias correction.

    First phase: every ``var_interval`` steps the variance is updated, from gradients averaged in
    full; gradients of the other steps are averaged by sign bits, and change the momentum only.
    Second phase: each rank steps by itself, and every ``local_step_interval`` steps the sums of
    their updates are averaged by sign bits. In between ranks have different weights; saving a
    checkpoint averages them in full precision, and so does `synchronize`.

    var_freeze_step: steps of the first phase.
    var_update_scaler: ``var_interval`` starts at 1 and doubles after so many updates.
    local_step_scaler: ``local_step_interval`` starts at 1 and doubles after so many steps.
    local_step_clipper: its largest value.

    The other arguments are those of `OneBitAdam`; ``non_freeze`` is not offered.
    """

    def __init__(
        self,
        params: Any,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
    ) -> None:
        check_arguments(
            amsgrad=amsgrad,
            max_grad_norm=max_grad_norm,
            deepspeed=deepspeed,
            cuda_aware=cuda_aware,
            comm_backend_name=comm_backend_name,
        )
        self.var_freeze_step = var_freeze_step
        self.var_update_scaler = var_update_scaler
        self.local_step_scaler = local_step_scaler
        self.local_step_clipper = local_step_clipper
        keys = {"lr": lr, "betas": tuple(betas), "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        # Counters are kept in the groups, so that a checkpoint has them; equal in all groups,
        # except for the sum of rates.
        counters = {
            "step": 0,
            "var_interval": 1,
            "var_counter": 0,
            "local_step_interval": 1,
            "local_step_counter": 0,
        }
        super().__init__(params, {**keys, "weight_decay": weight_decay, **counters, "lrs": 0.0})

    @property
    def _frozen(self) -> bool:
        return bool(self.param_groups[0]["step"] > self.var_freeze_step)

    @property
    def takes_averages(self) -> bool:
        """See `OneBit.takes_averages`: when the next step updates the variance."""
        group = self.param_groups[0]
        return not self._frozen and (group["step"] + 1) % group["var_interval"] == 0

    def update(self) -> None:
        """See `OneBit.update`."""
        full = self.takes_averages
        frozen = self._frozen
        rows = [(group, pair) for group, pairs in self.work() for pair in pairs]
        # 1. Gradients: averaged in full by `work`, by sign bits, or each rank's own.
        if not full and not frozen:
            grads = [(p, g) for _, (p, g) in rows]
            self.compress(grads)
            self.mask(grads)
        # 2. The update. In the second phase its sum is kept, for the ranks to average.
        for group, (param, grad) in rows:
            state = self.begin_state(param)
            state["step"] += 1
            beta1, beta2 = group["betas"]
            state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
            if full:
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            update = state["exp_avg"] / denominator(state["exp_avg_sq"], group)
            if group["weight_decay"]:
                update.add_(param, alpha=group["weight_decay"])
            param.add_(update, alpha=-group["lr"])
            if frozen:
                if "momentum_accumulator" not in state:
                    state["momentum_accumulator"] = torch.zeros_like(param)
                state["momentum_accumulator"].add_(update, alpha=-group["lr"])
        if full:
            self.variance_changed()
        for group in self.param_groups:
            group["step"] += 1
            if frozen:
                group["lrs"] += group["lr"]
        if (
            frozen
            and self.param_groups[0]["step"] % self.param_groups[0]["local_step_interval"] == 0
        ):
            self._bring_together(compressed=True)
        self._count(full=full, frozen=frozen)

    def _count(self, *, full: bool, frozen: bool) -> None:
        """Advance the two schedules after a step."""
        for group in self.param_groups:
            if frozen:
                group["local_step_counter"] += 1
                if group["local_step_counter"] == self.local_step_scaler:
                    group["local_step_counter"] = 0
                    group["local_step_interval"] = min(
                        self.local_step_clipper, 2 * group["local_step_interval"]
                    )
            elif full:
                group["var_counter"] += 1
                if group["var_counter"] == self.var_update_scaler:
                    group["var_counter"] = 0
                    group["var_interval"] *= 2
        # Errors were of gradients; from now on sums of updates are exchanged.
        if not frozen and self._frozen:
            self._errors.clear()
            log.info(
                "ZeroOneAdam: the variance is frozen after step %d", self.param_groups[0]["step"]
            )

    @torch.no_grad()
    def synchronize(self) -> None:
        """See `OneBit.synchronize`: what ranks did by themselves is averaged in full precision.

        Then weights and momenta are made equal to the bit, so that a checkpoint, which has them
        once, is this very run.
        """
        if self._drifted():
            self._bring_together(compressed=False)
        if self._frozen:
            params = [p for g in self.param_groups for p in g["params"] if self.state.get(p)]
            self.equalize(
                [(p, p) for p in params] + [(p, self.state[p]["exp_avg"]) for p in params]
            )

    def _drifted(self) -> bool:
        group = self.param_groups[0]
        # Right after the step that brought ranks together nothing has been summed up since.
        return any(g["lrs"] for g in self.param_groups) or (
            self._frozen and bool(group["step"] % group["local_step_interval"])
        )

    def _bring_together(self, *, compressed: bool) -> None:
        """Replace what each rank did since the last time by the average of all."""
        sums: Work = []
        places: list[tuple[dict[str, Any], Tensor, Tensor]] = []
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state.get(param)
                if not state or "momentum_accumulator" not in state:
                    continue
                # Back to the weights that all ranks have. Multiplied by its divisor the sum of
                # updates is a sum of momenta, whose elements have similar sizes, as compression to
                # signs needs.
                total = state["momentum_accumulator"]
                param.sub_(total)
                divisor = denominator(state["exp_avg_sq"], group)
                sums.append((param, total.mul_(divisor)))
                places.append((group, param, divisor))
        if compressed:
            self.compress(sums)
            self.mask(sums)
        else:
            self.mean(sums)
        still = []
        for (group, param, divisor), (_, total) in zip(places, sums, strict=True):
            momentum = self.state[param]["exp_avg"]
            # The mean momentum of the steps since, each of which moved by -lr * momentum.
            if group["lrs"]:
                momentum.copy_(total).div_(-group["lrs"])
            # Learning rates of 0 moved nothing: momenta are averaged as they are.
            else:
                still.append((param, momentum))
            param.add_(total.div_(divisor))
            total.zero_()
        self.mean(still)
        for group in self.param_groups:
            group["lrs"] = 0.0
