"""1-bit Adam: Adam until `freeze_step`, then momentum SGD with Adam's last variance and a
compressed momentum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ds_optimizers.onebit.base import OneBit, check_arguments, denominator, log


class OneBitAdam(OneBit):
    """1-bit Adam (Tang et al. 2021), without bias correction.

    params: parameters or group dicts. A group may have ``exp_avg_mask`` (see `base`) and
        ``non_freeze``: true for parameters that stay uncompressed, with a variance that goes on.
    freeze_step: updates of the warm-up, in which gradients are averaged in full. As in DeepSpeed
        the very first step counts, but changes no weights.
    eps_inside_sqrt: divide by √(v + eps) instead of √v + eps.
    bias_correction, deepspeed: without effect.

    The other arguments accept their defaults only.
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
        self.freeze_step = freeze_step
        # The largest count of a parameter, which is the optimizer's; None: to be read from the
        # states.
        self._steps: int | None = None
        keys = {"lr": lr, "betas": tuple(betas), "eps": eps, "eps_inside_sqrt": eps_inside_sqrt}
        super().__init__(params, {**keys, "weight_decay": weight_decay})

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

    def update(self) -> None:
        """See `OneBit.update`."""
        warm = self.takes_averages
        first = not any(self.state.values())
        rows = [(group, pair) for group, pairs in self.work() for pair in pairs]
        # Parameters that are never compressed still need their average.
        if not warm:
            self.mean([pair for group, pair in rows if group.get("non_freeze")])
        # 1. Moments. After the warm-up the variance is a constant, and the momentum is of this rank's
        # own gradient.
        momenta = []
        for group, (param, grad) in rows:
            state = self.begin_state(param)
            state["step"] += 1
            if first:
                continue
            beta1, beta2 = group["betas"]
            state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
            if warm or group.get("non_freeze"):
                state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            else:
                momenta.append((param, state["exp_avg"]))
        # 2. The average of momenta, which differ by each rank's last gradient only.
        if momenta:
            self.compress(momenta)
            self.mask(momenta)
        # 3. The update, the same on every rank.
        if not first:
            for group, (param, _) in rows:
                _apply(param, self.state[param], group)
        self._steps = None
        if warm and not self.takes_averages:
            log.info(
                "OneBitAdam: step %d ends the warm-up; from now on ranks exchange sign bits",
                self.freeze_step,
            )


def _apply(param: Tensor, state: Mapping[str, Tensor], group: Mapping[str, Any]) -> None:
    update = state["exp_avg"] / denominator(state["exp_avg_sq"], group)
    if group["weight_decay"]:
        update.add_(param, alpha=group["weight_decay"])
    param.add_(update, alpha=-group["lr"])
