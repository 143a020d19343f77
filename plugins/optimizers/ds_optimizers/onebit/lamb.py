"""1-bit LAMB: LAMB until `freeze_step`, then compressed momenta, and trust ratios that follow the
variance.

Trust ratios, factors and the one scale of all momenta are of full tensors and of the whole model:
where ranks have parts, these are brought together by a `Layout`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ds_optimizer_kit import Layout
from torch import Tensor

from ds_optimizers.onebit.base import OneBit, Work, check_arguments, denominator, log

Rows = list[tuple[dict[str, Any], tuple[Tensor, Tensor]]]
"""Each parameter that a step updates, with its group and its gradient."""


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
        self._bound = False
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

    def bind_layout(self, layout: Layout) -> None:
        """Where the tensors of this optimizer lie in full parameters; without it they are full."""
        self.layout = layout
        self._bound = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """torch's; the new parameters are full, until a layout is bound."""
        super().add_param_group(param_group)
        if not self._bound:
            self.layout = Layout.local(p for g in self.param_groups for p in g["params"])

    def update(self) -> None:
        """See `OneBit.update`."""
        rows = [(group, pair) for group, pairs in self.work() for pair in pairs]
        warm, measured = self._phase([param for _, (param, _) in rows])
        if warm:
            rows += self._missing({param for _, (param, _) in rows})
            self._warm(rows)
        else:
            if not measured:
                self._measure([param for _, (param, _) in rows])
            self._compressed(rows)
        self._steps = None
        if warm and not self.takes_averages:
            log.info(
                "OneBitLamb: step %d ends the warm-up; from now on ranks exchange sign bits",
                self.freeze_step,
            )

    def _phase(self, params: list[Tensor]) -> tuple[bool, bool]:
        """Whether this step is one of the warm-up, and whether `_measure` has been called. Collective.

        A stage of a pipeline may have nothing to train, and so no states that would tell.
        """
        flags = {}
        for param in params:
            if self.layout.parts[param].counted:
                told = [not self.takes_averages, "scaling_coeff" in self.state[param]]
                flags[param] = torch.tensor(told, dtype=torch.float64)
                break
        frozen, measured = self.layout.over_model(flags, 2).tolist()
        return not frozen, measured > 0

    def _missing(self, having: set[Tensor]) -> Rows:
        """Gradients of zero where other ranks have one of another part, such as other experts."""
        used = self.layout.used(having) - having
        return [
            (group, (param, torch.zeros_like(param)))
            for group in self.param_groups
            for param in group["params"]
            if param in used and param.numel()
        ]

    def _warm(self, rows: Rows) -> None:
        updates: list[Tensor] = []
        squares: dict[Tensor, Tensor] = {}
        for group, (param, grad) in rows:
            update = self._warm_update(param, grad, group)
            squares[param] = _squares(param, update)
            if self.layout.parts[param].cut:
                updates.append(update)
                continue
            # Of a full tensor this rank knows all: its update need not wait.
            self._warm_apply(param, update, group, squares[param].sqrt().tolist())
            updates.append(update.new_empty(0))
        sums = self.layout.sums(squares, length=lambda part: 2)
        for (group, (param, _)), update in zip(rows, updates, strict=True):
            if param in sums:
                self._warm_apply(param, update, group, sums[param].sqrt().tolist())

    def _warm_update(self, param: Tensor, grad: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Adam's update, without the trust ratio."""
        state = self.begin_state(param)
        if "lamb_coeff_freeze" not in state:
            state["lamb_coeff_freeze"] = torch.zeros((), dtype=torch.float64)
        state["step"] += 1
        beta1, beta2 = group["betas"]
        state["exp_avg"].mul_(beta1).add_(grad, alpha=1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        update: Tensor = state["exp_avg"] / denominator(state["exp_avg_sq"], group)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        # The variance that goes on changing, by which the ratio is corrected later.
        if int(state["step"]) == self.freeze_step:
            state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()
        return update

    def _warm_apply(
        self, param: Tensor, update: Tensor, group: Mapping[str, Any], norms: Sequence[float]
    ) -> None:
        """norms: of the full weight, and of the full update."""
        # LAMB: the update is scaled to the size of the weight.
        coeff = (
            min(max(norms[0] / norms[1], group["min_coeff"]), group["max_coeff"])
            if all(norms)
            else 1.0
        )
        # A ratio of 1 means a norm of 0, or a tensor that is not adapted: not part of the mean.
        if coeff != 1.0:
            mean = self.state[param]["lamb_coeff_freeze"]
            mean.mul_(self.coeff_beta).add_((1 - self.coeff_beta) * coeff)
        self._coeffs[param] = coeff
        param.add_(update, alpha=-group["lr"] * coeff)

    def _measure(self, params: list[Tensor]) -> None:
        """At the end of the warm-up: a factor per tensor that makes all momenta alike in size, since
        they will share one scale. Collective.
        """
        roots = {}
        squares = {p: _squares(self.state[p]["exp_avg"]) for p in params}
        for param, square in {**squares, **self.layout.sums(squares)}.items():
            elements = max(math.prod(self.layout.parts[param].shape), 1)
            roots[param] = math.sqrt(square.item() / elements)
        # Each parameter counts once, however many ranks have parts of it.
        sizes = {}
        for param in params:
            part = self.layout.parts[param]
            share = part.mine.numel / max(math.prod(part.shape), 1)
            sizes[param] = torch.tensor([roots[param] * share, share], dtype=torch.float64)
        total, count = self.layout.over_model(sizes, 2).tolist()
        mean = total / count if count else 0.0
        for param in params:
            state = self.state[param]
            size = roots[param]
            state["scaling_coeff"] = torch.tensor(
                mean / size if size and mean else 1.0, dtype=torch.float64
            )
            state["last_factor"] = torch.ones((), dtype=torch.float64)
            # A parameter that missed steps had not counted to freeze_step itself.
            if "exp_avg_sq_fresh" not in state:
                state["exp_avg_sq_fresh"] = state["exp_avg_sq"].clone()

    def _compressed(self, rows: Rows) -> None:
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
        self.compress_fused(momenta, self.layout)
        for param, momentum in momenta:
            momentum.div_(self.state[param]["scaling_coeff"].item())
        self.mask(momenta)
        # 3. The update, whose size depends on all of a tensor.
        updates: dict[Tensor, Tensor] = {}
        squares: dict[Tensor, Tensor] = {}
        ratios: dict[Tensor, Tensor] = {}
        for (group, (param, _)), last in zip(rows, before, strict=True):
            update, squares[param], ratios[param] = self._frozen_update(param, last, group)
            if self.layout.parts[param].cut:
                updates[param] = update
            else:
                self._frozen_apply(param, update, group, squares[param], ratios[param])
        sums = self.layout.sums(squares, length=lambda part: 2)
        largest = self.layout.maxima(ratios)
        for group, (param, _) in rows:
            if param in updates:
                self._frozen_apply(param, updates[param], group, sums[param], largest[param])

    def _frozen_update(
        self, param: Tensor, last: Tensor, group: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The update without its factor; the squared norms of it without weight decay and with; and
        by how much the variance has shrunk at most. Of this rank's part.
        """
        state = self.state[param]
        beta1, beta2 = group["betas"]
        # The average gradient, from the change of the averaged momentum: m' = β1 m + (1 - β1) g.
        seen = (state["exp_avg"] - beta1 * last).div_(1 - beta1)
        state["exp_avg_sq_fresh"].mul_(beta2).addcmul_(seen, seen, value=1 - beta2)
        divisor = denominator(state["exp_avg_sq"], group)
        update = state["exp_avg"] / divisor
        ratios = divisor / denominator(state["exp_avg_sq_fresh"], group)
        largest = ratios.max() if ratios.numel() else ratios.new_tensor(-math.inf)
        plain = _squares(update)
        if group["weight_decay"]:
            update.add_(param, alpha=group["weight_decay"])
        return update, torch.cat([plain, _squares(update)]), largest.double().reshape(1)

    def _frozen_apply(
        self,
        param: Tensor,
        update: Tensor,
        group: Mapping[str, Any],
        squares: Tensor,
        largest: Tensor,
    ) -> None:
        """squares, largest: as `_frozen_update` has them, of the full tensor."""
        state = self.state[param]
        # Where the variance has shrunk since, LAMB would step further: the largest ratio is the
        # factor.
        factor = largest.item()
        factor = factor if math.isfinite(factor) else 1.0
        if group["weight_decay"]:
            # Weight decay is no part of the adapted update: the factor counts by the share of the
            # rest.
            plain, whole = squares.sqrt().tolist()
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


def _squares(*tensors: Tensor) -> Tensor:
    """The sum of squares of each, in fp64."""
    norms = [torch.linalg.vector_norm(t, dtype=torch.float64) for t in tensors]
    return torch.stack(norms).square()
